"""A finished run, opened to be read: no lock, and nothing within reach but what is named."""

from kernel.run import guard, lineage
from kernel.run.flags import run_folder
from kernel.run.folder import RunFolder
from kernel.run.machine import settle


def open_finished(args, reads: list[str], more: list[str] = ()) -> tuple[RunFolder, dict[str, str]]:
    """A finished run, and the sha256 of `reads`: from now on only those and `more` may be opened.

    No lock is held. Raises ValueError if one of `reads` is missing or not what its maker recorded.
    """
    run = RunFolder(run_folder(args)[1])
    lineage.check_model(run.model_dir, run.model)
    sha256 = lineage.checked_inputs(run.dir, reads)
    guard.enclose(run.dir, ["config.json", *reads, *more], [])
    settle(run.common["threads_alone"])
    return run, sha256
