/* Two tenants share a drive by weight: cc two_tenants.c $(pkg-config --cflags --libs blkmq) && ./a.out [SECONDS] */
#include <blkmq.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { DEPTH = 16, BLOCK = 4096, SLOTS = 2 * DEPTH };
static struct slot { blkmq_disk *disk; char data[BLOCK]; } slots[SLOTS];

static void check(int64_t code) {
    if (code >= 0) return;
    fprintf(stderr, "%s\n", blkmq_error());
    exit(1);
}

static void read_next(blkmq_queue *queue, struct slot *slot) {
    static uint64_t offset;
    blkmq_io read = {BLKMQ_OP_READ, 0, offset++ * BLOCK % (1 << 30), BLOCK, slot->data, slot};
    check(blkmq_queue_submit(queue, slot->disk, &read));
}

static void flushed(void *user, int32_t code) { /* on a thread of the engine's */
    printf("flush of %s: %s\n", (const char *)user, blkmq_code_text(code));
}

int main(int argc, char **argv) {
    const char *config = "[daemon]\nsched = 'bfq'\n[disk.drive]\nnull = '1G'\nlatency = '2ms'\nparallel = 2\n"
                         "[group.'/one']\nweight = 100\n[group.'/three']\nweight = 300\n";
    time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 2);
    blkmq_engine *engine;
    blkmq_queue *queue; /* this thread's own */
    blkmq_disk *one, *three;
    check(blkmq_engine_open(config, 0, &engine));
    check(blkmq_queue_open(engine, &queue));
    check(blkmq_disk_open(engine, "drive", "/one", &one));
    check(blkmq_disk_open(engine, "drive", "/three", &three));
    for (int n = 0; n < SLOTS; n++) {
        slots[n].disk = n < DEPTH ? one : three;
        read_next(queue, &slots[n]);
    }
    struct pollfd event = {blkmq_queue_event(queue), POLLIN, 0};
    while (time(NULL) < end) {
        blkmq_completion ended[SLOTS];
        int64_t ns = blkmq_queue_prepare_to_wait(queue);
        poll(&event, 1, ns < 100000000 ? (int)((ns + 999999) / 1000000) : 100);
        int32_t count = blkmq_queue_poll(queue, ended, SLOTS);
        check(count);
        for (int32_t n = 0; n < count; n++) {
            check(ended[n].code);
            read_next(queue, (struct slot *)ended[n].user);
        }
    }
    blkmq_io flush = {BLKMQ_OP_FLUSH, 0, 0, 0, NULL, (void *)"/three"};
    check(blkmq_disk_submit(three, &flush, flushed));
    check(blkmq_queue_close(queue));
    char json[4096];
    check(blkmq_engine_statistics(engine, json, sizeof json));
    puts(json);
    check(blkmq_engine_close(engine, 10000)); /* the flush has ended */
    blkmq_disk_close(one);
    blkmq_disk_close(three);
}
