"""A library that loads like kernels and has none, which takes no time to compile."""

import subprocess
from pathlib import Path

SOURCE = """
struct { long columns, pairs, byte_offset; } layout = {7, 0, 0};
void end_at_illegal_instructions() {}
"""


def compile_stand_in(compiler: str, _family: object, library: Path) -> None:
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=SOURCE, text=True, check=True)
    library.chmod(0o700)
