"""The rubric of a run for which none was given: it judges nothing.

`success` is None, not False, so no rate and no difference is made from it; only the learned score, which
PPO optimised, is then known. Give one with `00_prepare.py --data FOLDER --rubric FILE.py`.
"""




def rubric(prompt: str, response: str | None, finish_reason: str, row: dict) -> dict:
    return {"success": None}
