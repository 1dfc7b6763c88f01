"""The end of a process whose processor lacks an instruction of a running kernel."""

import signal
import subprocess
from pathlib import Path

import pytest

from mars_ray.engine.kernels.families import KernelError
from mars_ray.engine.kernels.library_file import FLAGS, SOURCE, find_compiler

PROGRAM = """
#include <cstring>
#include <thread>
#include "illegal_instruction.h"

static void undefined() {
#ifdef __x86_64__
  asm volatile("ud2");
#else
  asm volatile(".inst 0");
#endif
}

static void kernel() {
  illegal_instruction::RunningKernel running;
  undefined();
}

int main(int, char** arguments) {
  illegal_instruction::end_process_with_a_line();
  illegal_instruction::end_process_with_a_line();  // a second engine loads the kernels
  if (!strcmp(arguments[1], "elsewhere")) undefined();
  std::thread first(kernel), second(kernel);
  first.join();
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        compiler = find_compiler()
    except KernelError as reason:
        pytest.skip(str(reason))
    program = tmp_path_factory.mktemp("program") / "program"
    command = [compiler, *FLAGS, f"-I{SOURCE.parent}", "-pthread", "-x", "c++", "-", "-o", str(program)]
    subprocess.run(command, input=PROGRAM, text=True, check=True)
    return program


def test_an_illegal_instruction_in_kernels_ends_the_process_with_one_line(program: Path) -> None:
    done = subprocess.run([program, "kernels"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith("mars-ray: the processor no longer has an instruction of the CPU kernels")


def test_an_illegal_instruction_elsewhere_is_left_to_others(program: Path) -> None:
    done = subprocess.run([program, "elsewhere"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGILL, "")
