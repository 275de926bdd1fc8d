/* Adds the seconds in the file HOST_CLOCK_FILE to the time of day of a process (LD_PRELOAD).
 *
 * The monotonic clock is left alone, as by a jump of a machine's clock. Deadlines in the time of
 * day, which the kernel compares with the real one, are moved back. libfaketime 0.9.10 breaks
 * time.sleep of Python 3.11 unless it moves the monotonic clock too.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_s(void) {
  const char *path = getenv("HOST_CLOCK_FILE");
  char text[32] = {0};
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return 0;
  if (read(file, text, sizeof text - 1) < 0) text[0] = 0;
  close(file);
  return atol(text);
}

static int is_time_of_day(clockid_t clock) {
  return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int code = syscall(SYS_clock_gettime, clock, now);
  if (code == 0 && is_time_of_day(clock)) now->tv_sec += offset_s();
  return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec found;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &found) != 0) return -1;
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *place) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (place) *place = now.tv_sec;
  return now.tv_sec;
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
  static int (*original)(sem_t *, const struct timespec *);
  struct timespec real = *deadline;
  if (!original) original = dlsym(RTLD_NEXT, "sem_timedwait");
  real.tv_sec -= offset_s();
  return original(semaphore, &real);
}
