//! Does N reads on 20 of many disks, in groups: `many_path N DISKS own|shared GROUPS ELEVATOR`. For
//! the instructions of one read, run it twice under callgrind with different N, and divide the
//! difference.

use anyhow::{Context, Result};
use blkmq_bench::engine::many::{self, Crowd};
use blkmq_core::sched;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [count, disks, queues, groups, elevator] = &words[..] else {
        anyhow::bail!("say what there is: many_path N DISKS own|shared GROUPS ELEVATOR");
    };
    let crowd = Crowd {
        disks: disks.parse()?,
        share_queue: queues == "shared",
        groups: groups.parse()?,
        elevator: sched::Registry::default()
            .get(elevator)
            .context("no such elevator")?,
    };
    println!("{} I/Os", many::run(crowd, count.parse()?)?);
    Ok(())
}
