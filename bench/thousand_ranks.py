"""How long one rank of a thousand takes to predict: python bench/thousand_ranks.py [JOB] [WORLD].

Writes what it measured to bench/results/thousand_ranks.txt. Time of the processor is what a machine that does nothing
else takes; the other is the wall's.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "thousand_ranks.txt"
SECONDS = 60


def main() -> int:
    """1 where it takes longer than SECONDS of the processor's time."""
    job = sys.argv[1] if len(sys.argv) > 1 else "f5_tts/base"
    world = sys.argv[2] if len(sys.argv) > 2 else "1024"
    command = [sys.executable, "-m", "memfit", "predict", job, "--world", world, "--engine", "fsdp2"]
    begin = time.perf_counter()
    done = subprocess.run([*command, "--device", "a100-80gb", "--json"], capture_output=True, text=True, check=True)
    wall = time.perf_counter() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime
    train = json.loads(done.stdout)["phases"]["train"]
    parts = {key: value for key, value in train["categories"].items() if value}
    line = (
        f"{job} --world {world} --engine fsdp2: {processor:.0f} s of the processor, {wall:.0f} s; "
        f"{train['allocated_bytes']:,} bytes allocated at the peak, {parts}"
    )
    print(line)
    RESULT.write_text(line + "\n")
    return int(processor > SECONDS)


if __name__ == "__main__":
    sys.exit(main())
