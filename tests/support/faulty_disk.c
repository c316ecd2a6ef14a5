/* A disk that fails at its k-th call: preloaded into a process, it counts what is called for files below one folder to
 * open them for writing, write, sync, cut, rename and delete them, and lets one call fail. See faulty_disk.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST_FILES 65536

enum { COUNTED, EIO_ONCE, ENOSPC_ONCE, TORN, FULL, KILLED };
static const char *const MODES[] = {"count", "eio", "enospc", "torn", "full", "kill"};

static char root[PATH_MAX], log_path[PATH_MAX];
static int mode, is_armed, is_env_read;
static long fails_at, num_calls;
static char is_watched[MOST_FILES], is_torn[MOST_FILES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Fail call number `at`, from 1, of those below `folder`; 0: none. Returns the calls so far. */
long faulty_disk(const char *folder, const char *how, long at) {
    pthread_mutex_lock(&lock);
    long before = num_calls;
    for (int each = 0; each <= KILLED; each++)
        if (!strcmp(how, MODES[each])) mode = each;
    snprintf(root, sizeof root, "%s", folder);
    fails_at = at, num_calls = 0, is_armed = is_env_read = 1;
    memset(is_torn, 0, sizeof is_torn);
    pthread_mutex_unlock(&lock);
    return before;
}

/* FAULTY_DISK=HOW:AT:LOG:FOLDER, which may come after the start: a fork gets its own. */
static void read_environment(void) {
    const char *given = is_env_read ? NULL : getenv("FAULTY_DISK");
    if (given == NULL) return;
    char how[16], folder[PATH_MAX];
    long at;
    if (sscanf(given, "%15[^:]:%ld:%4095[^:]:%4095[^:]", how, &at, log_path, folder) == 4) faulty_disk(folder, how, at);
}

static int is_below_root(int folder, const char *path) {
    read_environment();
    if (!is_armed || path == NULL) return 0;
    char whole[2 * PATH_MAX], link[64], base[PATH_MAX] = "";
    if (path[0] != '/') {
        if (folder == AT_FDCWD) {
            if (getcwd(base, sizeof base) == NULL) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t length = readlink(link, base, sizeof base - 1);
            if (length < 0) return 0;
            base[length] = 0;
        }
    }
    snprintf(whole, sizeof whole, "%s%s%s", base, base[0] ? "/" : "", path);
    size_t length = strlen(root);
    return !strncmp(whole, root, length) && (whole[length] == '/' || whole[length] == 0);
}

/* Count a call; returns its error, or 0. */
static int fails(const char *what, const char *path) {
    pthread_mutex_lock(&lock);
    long number = ++num_calls;
    pthread_mutex_unlock(&lock);
    if (log_path[0]) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%ld %s %s\n", number, what, path);
        int log = REAL(open)(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (log >= 0) {
            if (REAL(write)(log, line, length) < 0) abort();
            REAL(close)(log);
        }
    }
    if (!fails_at || (mode == FULL ? number < fails_at : number != fails_at)) return 0;
    switch (mode) {
    case ENOSPC_ONCE: return ENOSPC;
    case FULL: return strcmp(what, "unlink") && strcmp(what, "truncate") ? ENOSPC : 0;
    case EIO_ONCE: case TORN: return EIO;
    case KILLED: return -1;
    default: return 0;
    }
}

#define FAIL_IF(error) do { int told = (error); \
        if (told < 0) { kill(getpid(), SIGKILL); pause(); } \
        if (told) { errno = told; return -1; } } while (0)

static int opened(int file, int folder, const char *path, int flags) {
    if (file >= 0 && file < MOST_FILES) {
        is_watched[file] = (flags & O_ACCMODE) != O_RDONLY || flags & O_DIRECTORY || is_armed;
        is_watched[file] = is_watched[file] && is_below_root(folder, path), is_torn[file] = 0;
    }
    return file;
}

#define OPEN(name, parameters, folder, path, call) \
    int name parameters { \
        mode_t rights = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list more; va_start(more, flags); rights = va_arg(more, mode_t); va_end(more); \
        } \
        if ((flags & O_ACCMODE) != O_RDONLY && is_below_root(folder, path)) FAIL_IF(fails("open", path)); \
        return opened(call, folder, path, flags); \
    }
OPEN(open, (const char *path, int flags, ...), AT_FDCWD, path, REAL(open)(path, flags, rights))
OPEN(open64, (const char *path, int flags, ...), AT_FDCWD, path, REAL(open64)(path, flags, rights))
OPEN(openat, (int at, const char *path, int flags, ...), at, path, REAL(openat)(at, path, flags, rights))
OPEN(openat64, (int at, const char *path, int flags, ...), at, path, REAL(openat64)(at, path, flags, rights))

static int watches(int file) { return file >= 0 && file < MOST_FILES && is_watched[file]; }

int close(int file) {
    if (file >= 0 && file < MOST_FILES) is_watched[file] = 0;
    return REAL(close)(file);
}

/* A torn write is half done, and the one that follows it fails. */
#define WRITE(name, parameters, half, whole) \
    ssize_t name parameters { \
        if (!watches(file)) return whole; \
        if (is_torn[file]) { is_torn[file] = 0; errno = EIO; return -1; } \
        int error = fails("write", ""); \
        if (error && (mode == TORN || mode == KILLED)) { \
            ssize_t done = half; \
            if (error < 0) FAIL_IF(error); \
            is_torn[file] = 1; \
            return done; \
        } \
        FAIL_IF(error); \
        return whole; \
    }
WRITE(write, (int file, const void *from, size_t size), REAL(write)(file, from, size / 2),
      REAL(write)(file, from, size))
WRITE(pwrite64, (int file, const void *from, size_t size, off64_t at), REAL(pwrite64)(file, from, size / 2, at),
      REAL(pwrite64)(file, from, size, at))
WRITE(writev, (int file, const struct iovec *from, int count), REAL(writev)(file, from, count / 2),
      REAL(writev)(file, from, count))

#define OF_FILE(name, what, parameters, call) \
    int name parameters { \
        if (watches(file)) FAIL_IF(fails(what, "")); \
        return call; \
    }
OF_FILE(fsync, "fsync", (int file), REAL(fsync)(file))
OF_FILE(fdatasync, "fsync", (int file), REAL(fdatasync)(file))
OF_FILE(ftruncate, "truncate", (int file, off_t size), REAL(ftruncate)(file, size))
OF_FILE(ftruncate64, "truncate", (int file, off64_t size), REAL(ftruncate64)(file, size))

#define OF_PATH(name, what, folder, path, parameters, call) \
    int name parameters { \
        if (is_below_root(folder, path)) FAIL_IF(fails(what, path)); \
        return call; \
    }
OF_PATH(rename, "rename", AT_FDCWD, to, (const char *from, const char *to), REAL(rename)(from, to))
OF_PATH(renameat, "rename", b, to, (int a, const char *from, int b, const char *to), REAL(renameat)(a, from, b, to))
OF_PATH(unlink, "unlink", AT_FDCWD, path, (const char *path), REAL(unlink)(path))
OF_PATH(unlinkat, "unlink", at, path, (int at, const char *path, int how), REAL(unlinkat)(at, path, how))
OF_PATH(mkdir, "mkdir", AT_FDCWD, path, (const char *path, mode_t rights), REAL(mkdir)(path, rights))
