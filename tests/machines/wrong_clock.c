/* The clock of a machine, AHEAD seconds ahead, for programs that preload this; clocks that are never set stay right.
 *
 * Ours and not libfaketime: with that one Python cannot sleep (clock_nanosleep until a time of CLOCK_MONOTONIC).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += AHEAD;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += AHEAD;
    return failed;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept) *kept = now.tv_sec;
    return now.tv_sec;
}

/* Who waits until a time of this clock waits until the kernel's, which is right. Times of other clocks are small. */
static struct timespec kernels(const struct timespec *until) {
    struct timespec found = *until;
    if (found.tv_sec > 1000000000) found.tv_sec -= AHEAD;
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!wait) wait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec found = kernels(until);
    return wait(condition, mutex, &found);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*wait)(sem_t *, const struct timespec *);
    if (!wait) wait = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec found = kernels(until);
    return wait(semaphore, &found);
}
