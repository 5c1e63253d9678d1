"""Runs scripts as processes that have torch and the model classes loaded already.

Three seconds of a stage's start are imports, and the tests start some three hundred of them. This
program imports once, and forks for every line that it reads: {"argv", "cwd", "env", "stdin", "stdout",
"stderr"}. The child then is the script, with its arguments, folder, environment, files and exit. The
answer is the exit status.

Nothing of `kernel` is loaded here: which of its files a stage has loaded is part of its identity.
"""

import json
import os
import runpy
import sys

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch  # noqa: E402, F401
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402, F401
from transformers.models.llama import modeling_llama  # noqa: E402, F401
from transformers.models.qwen2 import modeling_qwen2  # noqa: E402, F401

for line in sys.stdin:
    asked = json.loads(line)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    for stream, mode in (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY)):
        file = os.open(asked[stream], mode)
        os.dup2(file, getattr(sys, stream).fileno())
        os.close(file)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    sys.argv = asked["argv"]
    sys.path[0] = os.path.dirname(sys.argv[0])
    break
else:
    sys.exit()
runpy.run_path(sys.argv[0], run_name="__main__")
