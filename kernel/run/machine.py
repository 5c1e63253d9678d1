"""What computes: threads, seeds and determinism, the device, library versions."""

import os
import platform
import random
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic CUDA matrix products
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy  # noqa: E402
import safetensors  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

transformers.utils.logging.disable_progress_bar()


def resolve_device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda, not {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no CUDA device is visible to torch")
    return name


def bfloat16_slowdown() -> float:
    """Time of a bfloat16 matrix product over the same in float32, both of a small model's shape.

    Measured, because names of instruction sets say little: a processor without bfloat16 arithmetic
    emulates it many times slower, one with it is about twice as fast.
    """

    kinds = torch.bfloat16, torch.float32
    factors = [(torch.ones(256, 576, dtype=d), torch.ones(1536, 576, dtype=d)) for d in kinds]
    best = [float("inf")] * 2
    # In turn and often: the first ones choose and warm up a kernel, and others may want the processor.
    for _ in range(25):
        for kind, (x, weight) in enumerate(factors):
            start = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            best[kind] = min(best[kind], time.perf_counter() - start)
    return best[0] / best[1]


def settle(threads: int) -> None:
    """Fixed thread count, deterministic algorithms and global seeds, for this process."""
    random.seed(0)  # nothing draws from the global generators; seeded so that a state can prove it
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    torch.utils.deterministic.fill_uninitialized_memory = False  # costs time; we read none
    torch.set_deterministic_debug_mode("error")  # deterministic algorithms, or an error
    torch.backends.cudnn.benchmark = False


def processor() -> str:
    """What computes: the name of the GPU, or of the CPU with the instructions that change its sums."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    found = torch.cpu.get_capabilities()
    wide = [
        n for n in sorted(found) if found[n] is True and n.startswith(("avx2", "avx512", "amx"))
    ]
    return " ".join([found.get("cpu_name", platform.machine()), *wide])


def versions() -> dict[str, str]:
    """What the bits of a result depend on besides code, data and config."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        "safetensors": safetensors.__version__,
        "numpy": numpy.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
    }
