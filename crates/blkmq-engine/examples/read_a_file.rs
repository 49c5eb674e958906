//! Reads a file through the engine: `cargo run --example read_a_file -- PATH`. Without a path it makes a file
//! of its own.
//!
//! Reads 64 blocks one at a time, then all of it with 32 reads in flight.

use std::path::PathBuf;

use blkmq_engine::{Attached, Bio, Buffer, Disk, Engine, Error};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given = std::env::args().nth(1).filter(|arg| !arg.starts_with('-'));
    let path = match &given {
        Some(path) => PathBuf::from(path),
        None => made()?,
    };
    let result = read(&path.display().to_string());
    if given.is_none() {
        std::fs::remove_file(&path)?;
    }
    Ok(result?)
}

fn read(path: &str) -> Result<(), Error> {
    let engine = Engine::builder()
        .disk(&format!("name=image,file={path},read_only=on"))
        .start()?;
    let disk = engine.disk("image")?;
    let mut attached = engine.attach()?;

    let mut buffer = Buffer::new(4096);
    let blocks = disk.size() / 4096;
    for block in 0..blocks.min(64) {
        buffer = attached.read(&disk, block * 4096, buffer)?;
    }
    println!("one at a time: {} blocks", blocks.min(64));

    let bytes = read_all(&mut attached, &disk)?;
    println!("{DEPTH} in flight: {bytes} bytes of {}", disk.size());
    Ok(())
}

/// Reads all whole pieces of a disk.
fn read_all(attached: &mut Attached, disk: &Disk) -> Result<u64, Error> {
    let mut offsets = (0..disk.size() / PIECE).map(|piece| piece * PIECE);
    let mut ended = Vec::new();
    let mut bytes = 0;
    for offset in offsets.by_ref().take(DEPTH) {
        let read = Bio::read(offset, Buffer::new(PIECE as usize));
        attached.submit(disk, read, offset).expect("room for 32 reads");
    }
    while attached.outstanding() > 0 {
        attached.wait(&mut ended, None);
        for completion in ended.drain(..) {
            let buffer = completion.into_result()?;
            bytes += buffer.len() as u64;
            if let Some(offset) = offsets.next() {
                let read = Bio::read(offset, buffer);
                attached.submit(disk, read, offset).expect("one has ended");
            }
        }
    }
    Ok(bytes)
}

fn made() -> std::io::Result<PathBuf> {
    let path = std::env::temp_dir().join(format!("blkmq-read-{}.raw", std::process::id()));
    std::fs::write(&path, vec![7; 8 << 20])?;
    Ok(path)
}

const DEPTH: usize = 32;
/// Bytes of one read.
const PIECE: u64 = 64 << 10;
