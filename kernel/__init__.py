"""PPO on a language model: the arithmetic lies here, eight rooms lie around it.

    ppo         token rewards, GAE, clipped policy loss, value loss      start here
    supervised  cross-entropy (SFT), Bradley-Terry (reward model)
    optim       AdamW, schedule, stop at NaN, state by name
    rollout     sampling one response per prompt
    score       one pass read three ways: log-probabilities, values, scores
    roles       actor, reference, reward, critic, and their files
    lora        the adapters
    reward      what gives a response its score: judges, functions, mixes

    fast/       the same forward pass, quick          run/       a stage in its folder, exact and locked
    data/       corpora, text to ids, base models     measure/   rows in, figures out
    gate/       a user's own data                     report/    the page
    finished/   verify, export, ask                   lesson/    exercises, the plan of a judge

The arithmetic opens `fast` and `data` only; a stage adds `run` and `measure`; the rest is no part of it.
tests/test_rooms.py holds that.

Letters: B sequences, P prompt tokens, T response tokens, L = P + T, N response tokens of a whole batch,
D hidden size, V vocabulary, r rank of the adapters.
"""
