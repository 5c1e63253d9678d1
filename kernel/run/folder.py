"""A run folder, opened: its settings, its base model, its rows and records.

    config.json                            profile, shared settings, base model (00_prepare.py)
    data/                                  the corpus (kernel/data/corpus.py says what is in it)
    checkpoints/<stage>/<variant>/         resume states and final adapters of a trained stage
                                           (<stage>/<name>/<variant>/ with --name)
    outputs/<stage>[/<variant>]/           metrics, records, tables; record.json closes a finished stage
"""

from pathlib import Path

from kernel.data.files import REPOSITORY, read_json, read_jsonl

TRAINED = {"10_sft": "sft", "20_reward": "reward", "30_ppo": "ppo"}  # stage: its section of a profile
SECTIONS = TRAINED | {"40_generate": "generate", "50_evaluate": "evaluate", "60_probe": "probe"}


class RunFolder:
    """Raises ValueError if the folder is no run: 00_prepare.py makes it one."""

    def __init__(self, folder: Path):
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} is no run folder: it has no config.json (run 00_prepare.py)")
        self.dir = folder
        self.made = read_json(folder / "config.json")  # profile, base, common, model
        self.profile, self.model = self.made["profile"], self.made["model"]  # model: two sha256
        self.base_sha256 = self.model["base_sha256"]
        # a model's folder is relative to the repository, unless it is somebody's own
        self.model_dir = REPOSITORY / self.made["common"]["model_dir"]
        self.common = {**self.made["common"], "model_dir": str(self.model_dir)}

    def rows(self, name: str) -> list[dict]:
        return read_jsonl(self.dir / name)

    def record(self, place: str, variant: str | None = None) -> dict | None:
        """What a finished stage said of itself, None if it is not finished."""
        path = self.dir / "outputs" / place / (variant or "") / "record.json"
        return read_json(path) if path.is_file() else None
