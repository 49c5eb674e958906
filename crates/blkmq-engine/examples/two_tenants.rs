//! Shares one file between two tenants with weights 1:3 and prints what each got: `cargo run --release
//! --example two_tenants -- SECONDS`, 1 by default.
//!
//! Each tenant has one half of the file as its disk, and a thread that keeps 32 reads in flight.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use blkmq_engine::{Bio, Buffer, Engine, Error};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seconds = std::env::args().nth(1).and_then(|arg| arg.parse().ok());
    let path = std::env::temp_dir().join(format!("blkmq-tenants-{}.raw", std::process::id()));
    std::fs::write(&path, vec![7; 2 * HALF as usize])?;
    let result = share(&path, Duration::from_secs(seconds.unwrap_or(1)));
    std::fs::remove_file(&path)?;
    Ok(result?)
}

fn share(path: &Path, time: Duration) -> Result<(), Error> {
    let engine = Engine::builder()
        .disk(&format!("name=file,file={}", path.display()))
        .disk(&format!("name=one,linear=file:0:{HALF},group=/one"))
        .disk(&format!("name=three,linear=file:{HALF}:{HALF},group=/three"))
        .group("/one,weight=100")
        .group("/three,weight=300")
        .scheduler("bfq")
        .start()?;
    thread::scope(|scope| {
        let tenants = ["one", "three"].map(|name| {
            let engine = &engine;
            scope.spawn(move || flood(engine, name, time))
        });
        tenants
            .into_iter()
            .try_for_each(|tenant| tenant.join().expect("a tenant does not panic"))
    })?;
    for group in ["/one", "/three"] {
        let read = engine.statistics(group)?.read;
        let wait_us = read.wait_ns / read.ios.max(1) / 1000;
        println!(
            "{group}: {} MiB in {} reads, each waited {wait_us} µs",
            read.bytes >> 20,
            read.ios
        );
    }
    Ok(())
}

/// Reads one disk again and again.
fn flood(engine: &Engine, name: &str, time: Duration) -> Result<(), Error> {
    let disk = engine.disk(name)?;
    let mut attached = engine.attach()?;
    let mut offsets = (0..disk.size() / PIECE).map(|piece| piece * PIECE).cycle();
    let mut next = |buffer| Bio::read(offsets.next().expect("endless"), buffer);
    let mut ended = Vec::new();
    for _ in 0..DEPTH {
        let read = next(Buffer::new(PIECE as usize));
        attached.submit(&disk, read, 0).expect("room for 32 reads");
    }
    let end = Instant::now() + time;
    while Instant::now() < end {
        attached.wait(&mut ended, Some(time));
        for completion in ended.drain(..) {
            let read = next(completion.into_result()?);
            attached.submit(&disk, read, 0).expect("one has ended");
        }
    }
    Ok(())
}

const DEPTH: usize = 32;
/// Bytes of one read.
const PIECE: u64 = 64 << 10;
/// Bytes of one tenant's disk.
const HALF: u64 = 64 << 20;
