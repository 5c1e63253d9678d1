"""What every program shares: flags, run folder, settings, one-line errors, seeds and versions."""

import argparse
import os
import platform
import random
import re
import sys
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic CUDA matrix products
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import numpy  # noqa: E402
import safetensors  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from kernel.data import read_json, sha256_file  # noqa: E402
from kernel.profiles import PROFILES  # noqa: E402

transformers.utils.logging.disable_progress_bar()

REPOSITORY = Path(__file__).resolve().parent.parent
COUNTS = (  # settings that must be positive
    "epochs batch micro_batch validation_rows iterations stop_at rollouts ppo_epochs generate_batch "
    "threads threads_alone lora_r lora_alpha prompt_limit response_limit context_limit"
).split()
VARIANTS = ("continuous", "interrupt", "resume", "check")


def parser(doc: str, variants: bool = False) -> argparse.ArgumentParser:
    """The flags every stage has; the stage adds its own."""
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    shared = p.add_argument_group("shared flags")
    shared.add_argument("--profile", choices=PROFILES, help="default: the run folder's, or smollm2")
    shared.add_argument("--run-dir", type=Path, help="default: runs/<profile>")
    shared.add_argument(
        "--redo",
        action="store_true",
        help="if inputs changed, replace this stage's old results instead of refusing",
    )
    if variants:
        shared.add_argument(
            "--variant",
            choices=VARIANTS,
            default="continuous",
            help="continuous: all at once; interrupt, resume: in two parts; check: prove they are equal",
        )
        shared.add_argument(
            "--name",
            type=plain_name,
            help="keep the results apart, under <stage>/NAME (experiments)",
        )
        shared.add_argument(
            "--save-every", type=int, metavar="N", help="updates between resume states"
        )
        shared.add_argument(
            "--tensorboard", action="store_true", help="write event files beside metrics.jsonl too"
        )
    return p


def plain_name(text: str) -> str:
    taken = (*VARIANTS, "judge", "length")  # variants, and what --reward means by them
    if (
        not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text)
        or text in taken
        or text.endswith(".py")
    ):
        raise argparse.ArgumentTypeError(
            f"'{text}': letters, digits, '-', '_' and '.'; not a Python file, not {', '.join(taken)}"
        )
    return text


def run_folder(args) -> tuple[str, Path]:
    """(profile, run folder) from the flags; an existing run folder knows its profile."""
    folder = args.run_dir or REPOSITORY / "runs" / (args.profile or "smollm2")
    folder = Path(os.path.abspath(folder))
    config_path = folder / "config.json"
    profile = args.profile or "smollm2"
    if config_path.is_file():
        made_with = read_json(config_path)["profile"]
        if args.profile and args.profile != made_with:
            raise ValueError(
                f"{folder} belongs to profile {made_with}, not {args.profile}; use another --run-dir"
            )
        profile = made_with
    return profile, folder


def override(section: dict, args) -> dict:
    """The profile's values, replaced by every flag of the same name that was given."""
    given = {k: v for k, v in vars(args).items() if k in section and v is not None}
    merged = {**section, **given}
    for key, value in merged.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and not (value == value and abs(value) < 1e12):
            raise ValueError(f"--{key.replace('_', '-')} must be a finite number, not {value}")
        if key in COUNTS and number:
            if value <= 0:
                raise ValueError(f"--{key.replace('_', '-')} must be positive, not {value}")
    return merged


def one_line_errors(stage: str) -> None:
    """Expected failures end in one line and a non-zero status; DEBUG=1 shows the traceback."""

    def hook(kind, error, traceback):
        if issubclass(kind, KeyboardInterrupt):
            print(f"\n{stage}: stopped. Run the same command again to go on.", file=sys.stderr)
        elif os.getenv("DEBUG"):
            sys.__excepthook__(kind, error, traceback)
        elif issubclass(kind, MemoryError) or "not enough memory" in str(error).lower():
            print(f"\n{stage}: error: out of memory; smaller batches need less", file=sys.stderr)
        elif issubclass(kind, torch.OutOfMemoryError):
            print(f"\n{stage}: error: out of memory on the device ({error})", file=sys.stderr)
        elif issubclass(kind, (ValueError, OSError, FloatingPointError)):
            text = " ".join(str(error).split())
            print(f"\n{stage}: error: {text}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, traceback)

    sys.excepthook = hook


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


def check_writable(folder: Path) -> None:
    """Raises OSError now, not after hours of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write_test_{os.getpid()}.tmp"  # two variants may start at once
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror})") from None


def code_sha256(stage: str) -> dict[str, str]:
    """sha256 of the stage's script and of every kernel module it has imported.

    Without kernel.profiles: that is data, and the values a stage took from it are in its config.
    """
    paths = {f"{stage}.py": REPOSITORY / f"{stage}.py"}
    for name, module in sys.modules.items():
        if name == "kernel.profiles":
            continue
        if name.startswith("kernel.") and getattr(module, "__file__", None):
            paths[name] = Path(module.__file__)
    return {name: sha256_file(path) for name, path in sorted(paths.items())}


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
