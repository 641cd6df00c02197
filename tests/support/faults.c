/* Fails, shortens or kills at the n-th system call that changes files below one folder. Preloaded:

       gcc -shared -fPIC -O1 -o faults.so faults.c -ldl
       LD_PRELOAD=./faults.so python ...

   halfbyte_arm(root, n, mode, value, sticky)   counts from 1; n = 0 only counts
       mode 0   the process is killed before the call
       mode 1   half of the bytes of a write are written, then the process is killed; any other call
                is executed, then the process is killed
       mode 2   the call fails with errno `value`; with `sticky` all later ones too
   halfbyte_exchange(error)                     renameat2 always fails with that errno; 0: it works
   halfbyte_count()                             calls so far

   Counted: opens that create or truncate, write, pwrite, writev, sendfile, copy_file_range, rename*, link, symlink, unlink*,
   rmdir, mkdir, fsync, fdatasync, ftruncate, truncate, posix_fallocate, mmap of a file that may be written. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static size_t root_length;
static atomic_long count;
static long at;
static int mode, value, sticky, exchange_error;

void halfbyte_arm(const char *folder, long n, int how, int error, int from_then_on) {
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    atomic_store(&count, 0);
    at = n, mode = how, value = error, sticky = from_then_on;
}
void halfbyte_exchange(int error) { exchange_error = error; }
long halfbyte_count(void) { return atomic_load(&count); }

static int below(const char *path) {
    char full[PATH_MAX];
    if (!root_length || !path) return 0;
    if (path[0] != '/') {
        char here[PATH_MAX / 2];
        if (!getcwd(here, sizeof here)) return 0;
        snprintf(full, sizeof full, "%s/%s", here, path);
        path = full;
    }
    return strncmp(path, root, root_length) == 0;
}

static const char *path_of(int fd, char *out) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, out, PATH_MAX - 1);
    if (n < 0) return NULL;
    out[n] = 0;
    return out;
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* 0: execute; 1: fail with errno; 2: execute, then kill. */
static int step(const char *path) {
    if (!below(path)) return 0;
    long n = atomic_fetch_add(&count, 1) + 1;
    if (!at || (sticky ? n < at : n != at)) return 0;
    if (mode == 0) die();
    if (mode == 1) return 2;
    errno = value;
    return 1;
}

#define ON_PATH(result, name, parameters, path, ...)           \
    result name parameters {                                   \
        static result(*real) parameters;                       \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);  \
        int what = step(path);                                 \
        if (what == 1) return -1;                              \
        result r = real(__VA_ARGS__);                          \
        if (what == 2) die();                                  \
        return r;                                              \
    }

ON_PATH(int, rename, (const char *a, const char *b), b, a, b)
ON_PATH(int, renameat, (int d, const char *a, int e, const char *b), b, d, a, e, b)
ON_PATH(int, link, (const char *a, const char *b), b, a, b)
ON_PATH(int, symlink, (const char *a, const char *b), b, a, b)
ON_PATH(int, unlink, (const char *a), a, a)
ON_PATH(int, unlinkat, (int d, const char *a, int flags), a, d, a, flags)
ON_PATH(int, rmdir, (const char *a), a, a)
ON_PATH(int, mkdir, (const char *a, mode_t m), a, a, m)
ON_PATH(int, truncate, (const char *a, off_t n), a, a, n)
ON_PATH(int, truncate64, (const char *a, off_t n), a, a, n)

int renameat2(int d, const char *a, int e, const char *b, unsigned int flags) {
    static int (*real)(int, const char *, int, const char *, unsigned int);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "renameat2");
    int what = step(b);
    if (what == 1) return -1;
    if (exchange_error && below(b)) {
        errno = exchange_error;
        return -1;
    }
    int r = real(d, a, e, b, flags);
    if (what == 2) die();
    return r;
}

#define ON_FILE(result, name, parameters, fd, ...)             \
    result name parameters {                                   \
        static result(*real) parameters;                       \
        char path[PATH_MAX];                                   \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);  \
        int what = step(path_of(fd, path));                    \
        if (what == 1) return -1;                              \
        result r = real(__VA_ARGS__);                          \
        if (what == 2) die();                                  \
        return r;                                              \
    }

ON_FILE(int, fsync, (int fd), fd, fd)
ON_FILE(int, fdatasync, (int fd), fd, fd)
ON_FILE(int, ftruncate, (int fd, off_t n), fd, fd, n)
ON_FILE(int, ftruncate64, (int fd, off_t n), fd, fd, n)
ON_FILE(ssize_t, sendfile, (int fd, int in, off_t *at_, size_t n), fd, fd, in, at_, n)
ON_FILE(ssize_t, sendfile64, (int fd, int in, off_t *at_, size_t n), fd, fd, in, at_, n)
ON_FILE(ssize_t, copy_file_range, (int in, off_t *i, int fd, off_t *o, size_t n, unsigned int f), fd, in, i, fd, o, n, f)
ON_FILE(ssize_t, writev, (int fd, const struct iovec *v, int n), fd, fd, v, n)
ON_FILE(int, posix_fallocate, (int fd, off_t a, off_t n), fd, fd, a, n)

#define WRITES(name, parameters, ...)                          \
    ssize_t name parameters {                                  \
        static ssize_t(*real) parameters;                      \
        char path[PATH_MAX];                                   \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, #name);  \
        int what = step(path_of(fd, path));                    \
        if (what == 1) return -1;                              \
        if (what == 2) n /= 2;                                 \
        ssize_t r = real(__VA_ARGS__);                         \
        if (what == 2) die();                                  \
        return r;                                              \
    }

WRITES(write, (int fd, const void *from, size_t n), fd, from, n)
WRITES(pwrite, (int fd, const void *from, size_t n, off_t o), fd, from, n, o)
WRITES(pwrite64, (int fd, const void *from, size_t n, off_t o), fd, from, n, o)

#define OPENS(name, first, ...)                                                        \
    {                                                                                  \
        mode_t m = 0;                                                                  \
        if (flags & O_CREAT) {                                                         \
            va_list more;                                                              \
            va_start(more, flags);                                                     \
            m = va_arg(more, mode_t);                                                  \
            va_end(more);                                                              \
        }                                                                              \
        if (!real) *(void **)&real = dlsym(RTLD_NEXT, name);                           \
        int what = flags & (O_CREAT | O_TRUNC) ? step(path) : 0;                       \
        if (what == 1) return -1;                                                      \
        int r = real(__VA_ARGS__);                                                     \
        if (what == 2) die();                                                          \
        return r;                                                                      \
    }

int open(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    OPENS("open", path, path, flags, m)
}
int open64(const char *path, int flags, ...) {
    static int (*real)(const char *, int, ...);
    OPENS("open64", path, path, flags, m)
}
int openat(int d, const char *path, int flags, ...) {
    static int (*real)(int, const char *, int, ...);
    OPENS("openat", path, d, path, flags, m)
}
int openat64(int d, const char *path, int flags, ...) {
    static int (*real)(int, const char *, int, ...);
    OPENS("openat64", path, d, path, flags, m)
}

void *mmap(void *where, size_t n, int prot, int flags, int fd, off_t o) {
    if (fd >= 0 && (prot & PROT_WRITE) && (flags & MAP_SHARED)) {
        char path[PATH_MAX];
        int what = step(path_of(fd, path));
        if (what == 1) return MAP_FAILED;
        if (what == 2) die();
    }
    return (void *)syscall(SYS_mmap, where, n, prot, flags, fd, o);
}
