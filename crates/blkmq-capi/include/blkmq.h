/* blkmq, the multi-queue block layer in one's own process: https://docs.rs/blkmq-engine has the ideas.
 *
 * Made from the Rust sources by cbindgen: do not edit.
 *
 * Every function that returns int32_t or int64_t returns 0 or more, or a negative code (enum blkmq_err); then
 * blkmq_error() tells this thread what is wrong. Each function says which thread may call it and whether it blocks.
 *
 * After fork(2) an engine belongs to the parent. In the child its functions return BLKMQ_ERR_FORKED, I/O on a disk ends
 * with BLKMQ_ERR_SHUTDOWN, and closing frees nothing of the parent's. A child may open an engine of its own. */

#ifndef BLKMQ_H
#define BLKMQ_H

#include <stddef.h>
#include <stdint.h>

// A flag: the write is durable when it has ended.
#define BLKMQ_FUA 1

// A flag: nobody waits for this write; schedulers prefer others to it.
#define BLKMQ_BACKGROUND 2

// How a call or an I/O ended: 0, or a negative number.
enum blkmq_err
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // No error.
  BLKMQ_ERR_OK = 0,
  // An I/O error.
  BLKMQ_ERR_IO = -1,
  // The medium could not be read or written.
  BLKMQ_ERR_MEDIUM = -2,
  // The connection to the drive failed.
  BLKMQ_ERR_TRANSPORT = -3,
  // No space is left, or the range is behind the end of the disk.
  BLKMQ_ERR_NO_SPACE = -4,
  // The disk does not support the operation.
  BLKMQ_ERR_NOT_SUPPORTED = -5,
  // The disk has no such range, or it is not made of whole blocks.
  BLKMQ_ERR_INVALID = -6,
  // The disk is read-only.
  BLKMQ_ERR_READ_ONLY = -7,
  // The drive did not answer in time.
  BLKMQ_ERR_TIMEOUT = -8,
  // Out of memory.
  BLKMQ_ERR_NO_MEMORY = -9,
  // The disk is removed, or the engine is shut down, or belongs to the parent of this process.
  BLKMQ_ERR_SHUTDOWN = -10,
  // There is no room: submit it again after a completion.
  BLKMQ_ERR_AGAIN = -11,
  // An argument is null, not UTF-8, or out of range.
  BLKMQ_ERR_ARGUMENT = -20,
  // The configuration is wrong.
  BLKMQ_ERR_CONFIGURATION = -21,
  // There is no disk of that name.
  BLKMQ_ERR_NO_DISK = -22,
  // There is no group of that path.
  BLKMQ_ERR_NO_GROUP = -23,
  // The engine cannot start, admit a thread or shut down.
  BLKMQ_ERR_ENGINE = -24,
  // The engine belongs to the parent of this process.
  BLKMQ_ERR_FORKED = -25,
  // This thread may not make this call.
  BLKMQ_ERR_THREAD = -26,
  // Something that was opened must be closed first.
  BLKMQ_ERR_BUSY = -27,
  // A defect of the library.
  BLKMQ_ERR_PANIC = -28,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum blkmq_err blkmq_err;
#else
typedef int32_t blkmq_err;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// What an I/O does.
enum blkmq_op
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  // Fills the data from the offset.
  BLKMQ_OP_READ = 0,
  // Stores the data at the offset. Durable when a flush that was submitted after its end has ended.
  BLKMQ_OP_WRITE = 1,
  // Makes all writes durable that have ended. Has no range.
  BLKMQ_OP_FLUSH = 2,
  // Tells the disk that the content is no longer needed. Has no data.
  BLKMQ_OP_DISCARD = 3,
  // Stores zeroes. Has no data.
  BLKMQ_OP_WRITE_ZEROES = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum blkmq_op blkmq_op;
#else
typedef uint32_t blkmq_op;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// A disk whose I/O is accounted to a group. For any thread.
typedef struct blkmq_disk blkmq_disk;

// The queues and the threads of an engine. For any thread.
typedef struct blkmq_engine blkmq_engine;

// A thread's own way to all disks of an engine: it submits, issues and reaps by itself. For the thread that opened
// it; other threads get `BLKMQ_ERR_THREAD`.
typedef struct blkmq_queue blkmq_queue;

// One I/O. Offsets and lengths are bytes, multiples of the disk's block size.
typedef struct blkmq_io {
  // One of `blkmq_op`.
  uint32_t op;
  // Flags, 0 for none.
  uint32_t flags;
  // Where on the disk.
  uint64_t offset;
  // How much, at most 1 GiB with data.
  uint64_t len;
  // `len` bytes, for reads and writes. The library uses them until the I/O has ended: they must not be freed,
  // changed or, in a read, looked at. Faster if they begin at a page.
  void *data;
  // The caller's own: it comes back with the end.
  void *user;
} blkmq_io;

// What is called when an I/O has ended: the `user` of the I/O, and 0 or a code. `blkmq_code_text` knows it.
//
// It comes on a thread of the engine's, which does the I/O of others: it must not block. It may submit. A C++
// exception that leaves it ends the process.
typedef void (*blkmq_end)(void *user, int32_t code);

// An I/O that has ended.
typedef struct blkmq_completion {
  // The `user` of the I/O.
  void *user;
  // 0 or a code.
  int32_t code;
} blkmq_completion;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The text of the calling thread's last call that failed: what, which value, what to do. Valid until this thread's
// next failure. Any thread.
const char *blkmq_error(void);

// What a code means, in general; for ever valid. Any thread.
const char *blkmq_code_text(int32_t code);

// The version of the library, such as `0.1.0`; for ever valid. Any thread.
const char *blkmq_version(void);

// Opens disks and starts an engine. `config` is a configuration in TOML, as for `blkmq serve -c`: tables
// `[disk.NAME]`, `[group."/PATH"]` and `[queue.NAME]`, and of `[daemon]` `sched`, `wait` and `reactors` (threads of the
// engine's own, 1 by default). What else a daemon's file has is ignored, such as addresses. At most `queues_max` queues can
// be open at a time; 0 means 8.
//
// Any thread. Blocks for some milliseconds, and until the drives are open.
//
// # Safety
// `config` is null or a text; `engine` is null or a place for a handle.
int32_t blkmq_engine_open(const char *config,
                          uint32_t queues_max,
                          struct blkmq_engine **engine);

// Ends an engine and frees its handle: I/O under way is finished, for at most `limit_ms` milliseconds. Disks of it
// can be closed later. Null is ignored.
//
// `BLKMQ_ERR_BUSY` while a queue is open, and `BLKMQ_ERR_THREAD` in a callback: the engine goes on. With any other
// error the handle is freed, but what was not finished in time may still use its data.
//
// Any thread, while no other uses the handle. Blocks until I/O under way has ended.
//
// # Safety
// `engine` is null or an open engine, which nobody uses during or after the call.
int32_t blkmq_engine_close(struct blkmq_engine *engine,
                           uint64_t limit_ms);

// Adds disks and groups while others have I/O under way: the tables `[disk.NAME]` and `[group."/PATH"]` of `config`, all
// of them or none. Returns how many disks there are, or a code. A group that there is stays as it is; settings of queues
// are for `blkmq_engine_open` alone.
//
// Any thread. Blocks until the drives are open.
//
// # Safety
// `engine` is null or an open engine; `config` is null or a text.
int32_t blkmq_engine_add(const struct blkmq_engine *engine,
                         const char *config);

// Removes a disk. At once nobody finds it, and I/O on its handles ends with `BLKMQ_ERR_SHUTDOWN`, also if a disk of its
// name comes again; close them as ever. I/O under way ends first. Then its drive is closed, unless other disks use it.
//
// The thread of each open queue must come back to its queue meanwhile. An error if one does not, or I/O does not end:
// the disk stays then, but handles used with `blkmq_disk_run` and `blkmq_disk_submit` must be opened again. A thread
// that has a queue itself is refused (`BLKMQ_ERR_ENGINE`): it calls `blkmq_queue_remove_disk`.
//
// Any thread, but no callback. Blocks for at most about `limit_ms` milliseconds.
//
// # Safety
// `engine` is null or an open engine; `name` is null or a text.
int32_t blkmq_engine_remove_disk(const struct blkmq_engine *engine,
                                 const char *name,
                                 uint64_t limit_ms);

// Writes the statistics of all groups as JSON, at most `size` bytes with the zero at the end, and returns how many
// there are without it, or a code. If that is `size` or more, the text is cut: call again with more room.
//
// `{"groups": {"/a": {"read": {"ios": 1, "bytes": 4096, "errors": 0, "wait_ns": 0, "service_ns": 900},
// "write": ..., "discard": ..., "flush": ...}}}`: numbers since the start, which only grow.
//
// Any thread. Never blocks.
//
// # Safety
// `engine` is null or an open engine; `json` has room for `size` bytes, or both are 0.
int64_t blkmq_engine_statistics(const struct blkmq_engine *engine,
                                char *json,
                                uintptr_t size);

// Changes a group's share against its siblings, 1 to 1000, while it is in use.
//
// Any thread. May block for some milliseconds.
//
// # Safety
// `engine` is null or an open engine; `group` is null or a text.
int32_t blkmq_engine_set_weight(const struct blkmq_engine *engine,
                                const char *group,
                                uint32_t weight);

// Gives a group its weight, caps and latency target while it is in use: `/a,weight=300,read_bps=100M`, as for
// `blkmq serve --group`. What the text leaves out has its default again; a missing group is made.
//
// Any thread. May block for some milliseconds.
//
// # Safety
// `engine` is null or an open engine; `group` is null or a text.
int32_t blkmq_engine_set_group(const struct blkmq_engine *engine,
                               const char *group);

// Finds a disk by its name. Its I/O is accounted to its own group, or to `group` if that is not null.
//
// Any thread. Never blocks.
//
// # Safety
// `engine` is null or an open engine; `name` and `group` are null or texts; `disk` is null or a place for a handle.
int32_t blkmq_disk_open(const struct blkmq_engine *engine,
                        const char *name,
                        const char *group,
                        struct blkmq_disk **disk);

// Frees the handle of a disk. I/O that was submitted on it ends all the same. Null is ignored.
//
// Any thread, while no other uses the handle. Never blocks.
//
// # Safety
// `disk` is null or an open disk, which nobody uses during or after the call.
void blkmq_disk_close(struct blkmq_disk *disk);

// The present size in bytes; 0 for null. Any thread.
//
// # Safety
// `disk` is null or an open disk.
uint64_t blkmq_disk_size(const struct blkmq_disk *disk);

// The smallest unit of offsets and lengths in bytes, a power of two from 512 to 65536; 0 for null. Any thread.
//
// # Safety
// `disk` is null or an open disk.
uint32_t blkmq_disk_block_size(const struct blkmq_disk *disk);

// Does one I/O and returns its code when it has ended.
//
// Any thread, but no callback (`BLKMQ_ERR_THREAD`). Blocks until the I/O has ended.
//
// # Safety
// `disk` is null or an open disk; `io` is null or an I/O as it is declared.
int32_t blkmq_disk_run(const struct blkmq_disk *disk, const struct blkmq_io *io);

// Has a thread of the engine's do one I/O, and calls `end` once when it has ended, unless this returns a code: then
// `end` never comes. If the engine has ended, `end` comes at once, on this thread.
//
// Any thread, also in a callback. Never blocks. The caller bounds how many are under way.
//
// # Safety
// `disk` is null or an open disk; `io` is null or an I/O as it is declared, whose `user` any thread may have; `end` is
// null or such a function.
int32_t blkmq_disk_submit(const struct blkmq_disk *disk,
                          const struct blkmq_io *io,
                          blkmq_end end);

// Opens a queue for the calling thread, which alone may use it.
//
// Any thread, but no callback. Blocks for some milliseconds.
//
// # Safety
// `engine` is null or an open engine; `queue` is null or a place for a handle.
int32_t blkmq_queue_open(const struct blkmq_engine *engine, struct blkmq_queue **queue);

// Closes a queue, and its descriptor. Completions that were not collected are dropped. Null is ignored.
//
// Its own thread. Blocks until its I/O has ended.
//
// # Safety
// `queue` is null or an open queue, which nobody uses during or after the call.
int32_t blkmq_queue_close(struct blkmq_queue *queue);

// Submits an I/O; its completion comes from a later poll or wait. It may be staged until then. `BLKMQ_ERR_AGAIN` if
// there is no room: submit it again after a completion. With an error, no completion comes.
//
// Its own thread. Never blocks.
//
// # Safety
// `queue` is null or an open queue; `disk` is null or an open disk of the same engine; `io` is null or an I/O as it is
// declared.
int32_t blkmq_queue_submit(struct blkmq_queue *queue,
                           const struct blkmq_disk *disk,
                           const struct blkmq_io *io);

// Submits `count` I/Os, which follow each other in memory, in their order: for many at a time this costs less than as
// many calls. Returns how many were taken: fewer than `count` if there is no room for more, or the next one is wrong, as
// submitting that one first tells. If the first one is not taken, returns its code.
//
// Its own thread. Never blocks.
//
// # Safety
// `queue` is null or an open queue; `disk` is null or an open disk of the same engine; `ios` is `count` I/Os as they are
// declared, or null and `count` 0.
int32_t blkmq_queue_submit_many(struct blkmq_queue *queue,
                                const struct blkmq_disk *disk,
                                const struct blkmq_io *ios,
                                uint32_t count);

// Removes a disk, as `blkmq_engine_remove_disk` does on other threads. I/O of this queue ends meanwhile, too; its
// completions come from the next poll or wait.
//
// Its own thread. Blocks for at most about `limit_ms` milliseconds.
//
// # Safety
// `queue` is null or an open queue; `name` is null or a text.
int32_t blkmq_queue_remove_disk(struct blkmq_queue *queue,
                                const char *name,
                                uint64_t limit_ms);

// Issues what is staged, stores at most `max` completions, and returns how many, or a code.
//
// Its own thread. Never blocks.
//
// # Safety
// `queue` is null or an open queue; `completions` has room for `max`, or is null and `max` 0.
int32_t blkmq_queue_poll(struct blkmq_queue *queue,
                         struct blkmq_completion *completions,
                         uint32_t max);

// Like `blkmq_queue_poll`, but blocks until an I/O has ended or `timeout_ms` milliseconds are over; a negative
// number means no limit. With no I/O under way it returns 0 at once.
//
// Its own thread.
//
// # Safety
// `queue` is null or an open queue; `completions` has room for `max`, or is null and `max` 0.
int32_t blkmq_queue_wait(struct blkmq_queue *queue,
                         struct blkmq_completion *completions,
                         uint32_t max,
                         int64_t timeout_ms);

// A descriptor that becomes readable when `blkmq_queue_poll` has work, or a code: for poll, epoll and the like. The
// queue owns it; never read or close it. Before each wait for it, call `blkmq_queue_prepare_to_wait`.
//
// It may miss ends on disks in Ceph, and on NBD disks while they connect again: there, poll now and then.
//
// Its own thread. Never blocks.
//
// # Safety
// `queue` is null or an open queue.
int32_t blkmq_queue_event(struct blkmq_queue *queue);

// Issues what is staged, clears the descriptor, and returns for how many nanoseconds the thread may wait for it
// before the next `blkmq_queue_poll`, or a code. 0: not at all; `INT64_MAX`: no limit.
//
// Its own thread. Never blocks.
//
// # Safety
// `queue` is null or an open queue.
int64_t blkmq_queue_prepare_to_wait(struct blkmq_queue *queue);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* BLKMQ_H */
