// Ends the process with one line when the processor lacks an instruction of a running kernel.
//
// Features are checked before a library is loaded, but a virtual machine may move to another processor while it runs.
#pragma once
#include <signal.h>
#include <unistd.h>

#include <atomic>

namespace illegal_instruction {

static std::atomic<int> running_kernels;
static struct sigaction previous;

struct RunningKernel {
  RunningKernel() { running_kernels++; }
  ~RunningKernel() { running_kernels--; }
};

inline void handle(int, siginfo_t*, void*) {
  if (running_kernels) {
    static std::atomic_flag told = ATOMIC_FLAG_INIT;
    while (told.test_and_set()) pause();  // another thread writes the line
    constexpr char LINE[] =
        "mars-ray: the processor no longer has an instruction of the CPU kernels, so this process ends. Start it again; "
        "it will choose kernels for this processor.\n";
    (void)!write(STDERR_FILENO, LINE, sizeof LINE - 1);
    _exit(1);
  }
  sigaction(SIGILL, &previous, nullptr);  // the instruction runs again and meets the previous handler
}

inline void end_process_with_a_line() {
  static bool installed = false;
  if (installed) return;  // the previous handler would be this one
  installed = true;
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &previous);
}

}  // namespace illegal_instruction
