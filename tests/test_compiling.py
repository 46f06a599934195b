"""What a process has compiled, and that the next one on the machine compiles nothing."""

import json
import os
import subprocess
import sys

CODE = """
import json
from rl.compiling import compiled
before = compiled()
from tests.test_sampler import rollouts
rollouts(max_tokens=4)
found = compiled() - before
print(json.dumps([found.seconds, found.num_programs]))
"""


def run(folder):
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PLATFORMS": "cpu"}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_compiles_nothing(tmp_path):
    seconds, num_programs = run(tmp_path)
    assert num_programs >= 6 and seconds > 0.1
    again, num_again = run(tmp_path)
    assert num_again == 0 and 0 < again < seconds
