"""Start the server with the shipped pair and ask it by clients that others wrote: `make test-clients` installs them.

    python tests/clients/run.py ENVIRONMENT NODE_FOLDER [CLIENT ...]

ENVIRONMENT: a Python environment with the clients; NODE_FOLDER: where npm has installed `ai`, or - for none. Prints a
line for each client, and fails if one of them failed.
"""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
IN_PYTHON = ("openai", "litellm", "langchain", "llm", "lm_eval", "guidellm")
SECONDS = 600


def main(environment: str, node: str, *only: str) -> int:
    command = [sys.executable, "-m", "heavypath.speculative", "serve", "--port", "0", "--max-tokens", "1024"]
    command += ["--template", str(HERE / "template.jinja"), "--per-request-metrics"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = []
        for line in server.stderr:
            said.append(line)
            if found := re.search(r" at (http://\S+/v1)", line):
                break
        else:
            sys.exit("".join(said))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        failed = [name for name in only or (*IN_PYTHON, "ai") if not asked(name, environment, node, found[1])]
    finally:
        server.terminate()
        server.wait()
    return len(failed)


def asked(name: str, environment: str, node: str, base: str) -> bool:
    if name == "ai":
        if node == "-":
            print("ai: left out")
            return True
        (Path(node) / "ai.mjs").write_text((HERE / "ai.mjs").read_text())  # modules are looked for beside it
        command = ["node", str(Path(node) / "ai.mjs"), base]
    else:
        command = [str(Path(environment) / "bin" / "python"), str(HERE / "python_clients.py"), name, base]
    begin = time.monotonic()
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # whose packages are other ones
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=own)
    print(f"{name}: {'right' if done.returncode == 0 else 'FAILED'}, {time.monotonic() - begin:.0f} s", flush=True)
    if done.returncode:
        print(done.stdout[-1000:] + done.stderr[-4000:], flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
