/* Faults are told by codes and texts, in each thread and in a fork. Run by tests/programs.rs. */
#include <blkmq.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #what, blkmq_error()); \
            exit(1); \
        } \
    } while (0)

static const char *config = "[disk.ram]\nram = '1M'\n[disk.late]\nnull = '1M'\nlatency = '50ms'\n";
static char data[4096];
static blkmq_engine *engine;
static blkmq_disk *ram, *late;
static blkmq_queue *queue;

static int says(const char *part) { return strstr(blkmq_error(), part) != NULL; }

static blkmq_io io(uint32_t op, uint64_t offset, uint64_t len) {
    blkmq_io io = {op, 0, offset, len, data, (void *)7};
    return io;
}

static void arguments(void) {
    blkmq_engine *none = (blkmq_engine *)1;
    char json[16];
    CHECK(blkmq_engine_open("[disk.a]\nram = '1Q'\n", 0, &none) == BLKMQ_ERR_CONFIGURATION && says("1Q") && !none);
    CHECK(blkmq_engine_open("\xff", 0, &none) == BLKMQ_ERR_ARGUMENT && says("config rejected"));
    CHECK(blkmq_engine_open(NULL, 0, &none) == BLKMQ_ERR_ARGUMENT && says("config is null"));
    CHECK(blkmq_engine_open(config, 0, NULL) == BLKMQ_ERR_ARGUMENT);
    blkmq_disk *disk;
    CHECK(blkmq_disk_open(engine, "x", NULL, &disk) == BLKMQ_ERR_NO_DISK && says("late, ram"));
    CHECK(blkmq_disk_open(engine, "ram", "/x", &disk) == BLKMQ_ERR_NO_GROUP && !disk);
    CHECK(blkmq_engine_set_weight(engine, "/ram", 100000) < 0 && says("/ram"));
    CHECK(blkmq_engine_set_weight(engine, "/ram", 300) == 0);
    CHECK(blkmq_engine_set_group(engine, "/ram,iops=x") == BLKMQ_ERR_CONFIGURATION && says("iops=x"));
    CHECK(blkmq_engine_set_group(engine, NULL) == BLKMQ_ERR_ARGUMENT && says("group is null"));
    CHECK(blkmq_engine_set_group(engine, "/ram,weight=200,bps=1G") == 0);
    CHECK(blkmq_engine_statistics(engine, json, 16) > 16 && !strcmp(json, "{\"groups\":{\"/\":"));
    CHECK(blkmq_engine_statistics(engine, NULL, 0) > 16);
    CHECK(blkmq_disk_size(ram) == 1 << 20 && blkmq_disk_block_size(ram) == 512);
    blkmq_io odd = io(9, 0, 0), flags = io(BLKMQ_OP_WRITE, 0, 512), null = flags, long_one = flags;
    flags.flags = 4, null.data = NULL, long_one.len = (uint64_t)1 << 40;
    CHECK(blkmq_disk_run(ram, &odd) == BLKMQ_ERR_ARGUMENT && says("op 9 rejected"));
    CHECK(blkmq_disk_run(ram, &flags) == BLKMQ_ERR_ARGUMENT && says("0x4"));
    CHECK(blkmq_queue_submit(queue, ram, &null) == BLKMQ_ERR_ARGUMENT && says("data"));
    CHECK(blkmq_queue_submit(queue, ram, &long_one) == BLKMQ_ERR_ARGUMENT && says("1073741824"));
    CHECK(blkmq_queue_submit(queue, NULL, &long_one) == BLKMQ_ERR_ARGUMENT && says("disk is null"));
    CHECK(blkmq_disk_submit(ram, &odd, NULL) == BLKMQ_ERR_ARGUMENT && says("end is null"));
    CHECK(blkmq_queue_poll(queue, NULL, 4) == BLKMQ_ERR_ARGUMENT);
    CHECK(blkmq_engine_close(engine, 0) == BLKMQ_ERR_BUSY && says("1 open queues"));
    CHECK(!strcmp(blkmq_code_text(BLKMQ_ERR_READ_ONLY), "the disk is read-only") && *blkmq_version() == '0');
    blkmq_disk_close(NULL);
}

static void ios(void) {
    blkmq_io far = io(BLKMQ_OP_WRITE, 1 << 20, 512), write = io(BLKMQ_OP_WRITE, 512, 4096);
    blkmq_io read = io(BLKMQ_OP_READ, 512, 4096), zeroes = io(BLKMQ_OP_WRITE_ZEROES, 1024, 512);
    CHECK(blkmq_disk_run(ram, &far) == BLKMQ_ERR_NO_SPACE && says("behind the end"));
    far.op = BLKMQ_OP_READ;
    CHECK(blkmq_disk_run(ram, &far) == BLKMQ_ERR_INVALID);
    memset(data, 5, sizeof data);
    write.flags = BLKMQ_FUA | BLKMQ_BACKGROUND;
    CHECK(blkmq_disk_run(ram, &write) == 0 && blkmq_disk_run(ram, &zeroes) == 0);
    memset(data, 0, sizeof data);
    blkmq_completion ended[2];
    CHECK(blkmq_queue_wait(queue, ended, 2, -1) == 0);
    CHECK(blkmq_queue_submit(queue, ram, &read) == 0 && blkmq_queue_submit(queue, ram, &far) == 0);
    int count = 0;
    while (count < 2) { /* one at a time */
        CHECK(blkmq_queue_wait(queue, &ended[count], 1, -1) == 1);
        count++;
    }
    CHECK(ended[0].user == (void *)7 && ended[0].code + ended[1].code == BLKMQ_ERR_INVALID);
    CHECK(data[0] == 5 && data[512] == 0 && data[1023] == 0 && data[1024] == 5);
    int32_t refused = 0;
    read = io(BLKMQ_OP_WRITE_ZEROES, 0, 512);
    for (count = 0; count < 100000 && !refused; count++)
        refused = blkmq_queue_submit(queue, late, &read);
    CHECK(refused == BLKMQ_ERR_AGAIN && says("no room"));
    for (count -= 1; count > 0;) {
        int32_t some = blkmq_queue_wait(queue, ended, 2, 10000);
        CHECK(some > 0);
        count -= some;
    }
}

static void many(void) {
    blkmq_io ios[40];
    blkmq_completion ended[40];
    for (int at = 0; at < 40; at++)
        ios[at] = io(BLKMQ_OP_WRITE_ZEROES, 512 * (uint64_t)at, 512), ios[at].user = &ios[at];
    ios[33].op = 9;
    CHECK(blkmq_queue_submit_many(queue, ram, ios, 40) == 33);
    CHECK(blkmq_queue_submit_many(queue, ram, &ios[33], 7) == BLKMQ_ERR_ARGUMENT && says("op 9 rejected"));
    CHECK(blkmq_queue_submit_many(queue, ram, &ios[34], 6) == 6);
    CHECK(blkmq_queue_submit_many(queue, ram, NULL, 0) == 0);
    CHECK(blkmq_queue_submit_many(queue, ram, NULL, 1) == BLKMQ_ERR_ARGUMENT && says("ios is null"));
    char seen[40] = {0};
    for (int count = 0; count < 39;) {
        int32_t some = blkmq_queue_wait(queue, ended, 40, -1);
        CHECK(some > 0);
        count += some;
        while (some-- > 0)
            CHECK(ended[some].code == 0 && seen[(blkmq_io *)ended[some].user - ios]++ == 0);
    }
    CHECK(!seen[33]);
    int32_t taken = 1, all = 0;
    for (; taken > 0; all += taken > 0 ? taken : 0)
        taken = blkmq_queue_submit_many(queue, late, ios, 33);
    CHECK(taken == BLKMQ_ERR_AGAIN && all > 33);
    for (; all > 0; all -= taken)
        CHECK((taken = blkmq_queue_wait(queue, ended, 40, 10000)) > 0);
}

static void comes_and_goes(void) {
    blkmq_io read = io(BLKMQ_OP_READ, 0, 512);
    blkmq_completion ended[2];
    blkmq_disk *disk, *again;
    CHECK(blkmq_engine_add(engine, "[disk.ram]\nram = '1M'\n") == BLKMQ_ERR_CONFIGURATION && says("ram"));
    CHECK(blkmq_engine_add(engine, NULL) == BLKMQ_ERR_ARGUMENT);
    CHECK(blkmq_engine_add(engine, "[disk.b]\nnull = '1M'\nlatency = '5ms'\n[disk.c]\nram = '1M'\n") == 2);
    CHECK(blkmq_disk_open(engine, "b", "/ram", &disk) == 0 && blkmq_queue_submit(queue, disk, &read) == 0);
    CHECK(blkmq_engine_remove_disk(engine, "x", 1000) < 0 && says("x"));
    CHECK(blkmq_engine_remove_disk(engine, "b", 1000) == BLKMQ_ERR_ENGINE && says("this thread is attached"));
    CHECK(blkmq_queue_remove_disk(queue, "b", 10000) == 0);
    CHECK(blkmq_queue_wait(queue, ended, 2, -1) == 1 && ended[0].code == 0);
    CHECK(blkmq_engine_add(engine, "[disk.b]\nram = '1M'\n") == 1 && blkmq_disk_open(engine, "b", NULL, &again) == 0);
    CHECK(blkmq_disk_run(disk, &read) == BLKMQ_ERR_SHUTDOWN && blkmq_disk_run(again, &read) == 0);
    CHECK(blkmq_queue_submit(queue, disk, &read) == 0 && blkmq_queue_wait(queue, ended, 2, -1) == 1);
    CHECK(ended[0].code == BLKMQ_ERR_SHUTDOWN);
    blkmq_disk_close(disk);
    blkmq_disk_close(again);
}

static void *on_other_thread(void *unused) {
    blkmq_completion ended;
    blkmq_io read = io(BLKMQ_OP_READ, 0, 512);
    CHECK(blkmq_queue_poll(queue, &ended, 1) == BLKMQ_ERR_THREAD && says("thread that opened it"));
    CHECK(blkmq_queue_submit(queue, ram, &read) == BLKMQ_ERR_THREAD && blkmq_queue_event(queue) == BLKMQ_ERR_THREAD);
    CHECK(blkmq_queue_close(queue) == BLKMQ_ERR_THREAD);
    return unused;
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int calls;

static void in_callback(void *user, int32_t code) {
    blkmq_io read = io(BLKMQ_OP_READ, 0, 512);
    blkmq_queue *none;
    CHECK(code == 0 && user == (void *)7);
    CHECK(blkmq_disk_run(ram, &read) == BLKMQ_ERR_THREAD && says("callback"));
    CHECK(blkmq_engine_close(engine, 0) == BLKMQ_ERR_THREAD);
    CHECK(blkmq_queue_open(engine, &none) == BLKMQ_ERR_THREAD);
    pthread_mutex_lock(&mutex);
    if (++calls < 4)
        CHECK(blkmq_disk_submit(ram, &read, in_callback) == 0);
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&mutex);
}

static void threads(void) {
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, on_other_thread, NULL) && !pthread_join(thread, NULL));
    blkmq_io read = io(BLKMQ_OP_READ, 0, 512);
    CHECK(blkmq_disk_submit(ram, &read, in_callback) == 0);
    pthread_mutex_lock(&mutex);
    while (calls < 4)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}

static int ended_with;
static void note(void *user, int32_t code) {
    CHECK(user == (void *)7);
    ended_with = code;
}

static void in_fork(void) {
    blkmq_completion ended;
    blkmq_io read = io(BLKMQ_OP_READ, 0, 512);
    blkmq_disk *disk;
    blkmq_queue *other;
    CHECK(blkmq_queue_submit(queue, ram, &read) == BLKMQ_ERR_FORKED && says("start another engine"));
    CHECK(blkmq_queue_wait(queue, &ended, 1, -1) == BLKMQ_ERR_FORKED);
    CHECK(blkmq_queue_open(engine, &other) == BLKMQ_ERR_FORKED && blkmq_disk_open(engine, "ram", NULL, &disk) < 0);
    CHECK(blkmq_disk_run(ram, &read) == BLKMQ_ERR_SHUTDOWN);
    CHECK(blkmq_disk_submit(ram, &read, note) == 0 && ended_with == BLKMQ_ERR_SHUTDOWN);
    CHECK(blkmq_engine_statistics(engine, NULL, 0) == BLKMQ_ERR_FORKED);
    CHECK(blkmq_queue_close(queue) == BLKMQ_ERR_FORKED);
    CHECK(blkmq_engine_close(engine, 1000) == BLKMQ_ERR_FORKED);
    CHECK(blkmq_engine_open(config, 0, &engine) == 0 && blkmq_disk_open(engine, "ram", NULL, &disk) == 0);
    CHECK(blkmq_disk_run(disk, &read) == 0 && blkmq_engine_close(engine, 10000) == 0);
    _exit(0);
}

static void forks(void) {
    blkmq_io read = io(BLKMQ_OP_WRITE_ZEROES, 0, 512);
    blkmq_completion ended[2];
    CHECK(blkmq_queue_submit(queue, late, &read) == 0 && blkmq_queue_poll(queue, ended, 2) == 0);
    int status = -1;
    pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        in_fork();
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(blkmq_queue_wait(queue, ended, 2, -1) == 1 && ended[0].code == 0);
}

int main(void) {
    CHECK(blkmq_engine_open(config, 2, &engine) == 0);
    CHECK(blkmq_disk_open(engine, "ram", NULL, &ram) == 0 && blkmq_disk_open(engine, "late", NULL, &late) == 0);
    CHECK(blkmq_queue_open(engine, &queue) == 0);
    arguments();
    ios();
    many();
    comes_and_goes();
    threads();
    forks();
    CHECK(blkmq_queue_close(queue) == 0);
    /* I/O under way is finished by the end of the engine, and what comes later is refused. */
    blkmq_io write = io(BLKMQ_OP_WRITE, 0, 512);
    ended_with = 1;
    CHECK(blkmq_disk_submit(late, &write, note) == 0 && ended_with == 1);
    CHECK(blkmq_engine_close(engine, 10000) == 0 && ended_with == 0);
    CHECK(blkmq_disk_submit(late, &write, note) == 0 && ended_with == BLKMQ_ERR_SHUTDOWN);
    blkmq_disk_close(ram);
    blkmq_disk_close(late);
    return 0;
}
