/* A callback whose exception leaves it ends the process: this program dies by SIGABRT. Run by tests/programs.rs. */
#include <blkmq.h>

#include <stdexcept>
#include <unistd.h>

static void throws(void *, int32_t) { throw std::runtime_error("the test's own"); }

int main() {
    blkmq_engine *engine;
    blkmq_disk *disk;
    blkmq_io flush = {BLKMQ_OP_FLUSH, 0, 0, 0, nullptr, nullptr};
    if (blkmq_engine_open("[disk.ram]\nram = '1M'\n", 0, &engine) || blkmq_disk_open(engine, "ram", nullptr, &disk))
        return 2;
    if (blkmq_disk_submit(disk, &flush, throws))
        return 3;
    sleep(10);
    return 0;
}
