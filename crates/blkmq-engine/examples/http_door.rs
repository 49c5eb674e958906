//! A front door of one's own: disks by HTTP, for `curl -r 0-511 http://127.0.0.1:8080/DISK`. Run it with `cargo run
//! --example http_door -- 127.0.0.1:8080`. Without an address it takes a free port, and is its own client.
//!
//! Each connection has a thread, asks once, and is accounted to its disk's group.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use blkmq_engine::{Buffer, Disk, Engine};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given = std::env::args().nth(1).filter(|arg| !arg.starts_with('-'));
    let engine = Engine::builder()
        .disk("name=one,ram=1M,group=/one")
        .disk("name=three,ram=1M,group=/three")
        .group("/one,read_bps=10M")
        .start()?;
    engine
        .disk("three")?
        .write(512, Buffer::from(&[b'3'; 512][..]))
        .wait()?;
    let listener = TcpListener::bind(given.as_deref().unwrap_or("127.0.0.1:0"))?;
    let address = listener.local_addr()?;
    println!("disks {} at http://{address}/", engine.disks().join(", "));
    let statistics = engine.clone();
    let door = thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let engine = engine.clone();
            // A client that leaves early is its own loss.
            thread::spawn(move || serve(&engine, client).ok());
        }
    });
    if given.is_some() {
        door.join().expect("the door does not panic");
        return Ok(());
    }
    for (request, status) in [
        ("/three HTTP/1.1\r\nRange: bytes=508-515", "206"),
        ("/three HTTP/1.1\r\nrange: bytes=9999999-", "416"),
        ("/nine HTTP/1.1", "404"),
    ] {
        let mut client = TcpStream::connect(address)?;
        write!(client, "GET {request}\r\n\r\n")?;
        let mut reply = String::new();
        client.read_to_string(&mut reply)?;
        println!("{reply}\n");
        assert!(reply.contains(status), "expected {status}");
    }
    println!("/three: {:?}", statistics.statistics("/three")?.read);
    Ok(())
}

/// Answers one request: a part of a disk, or all of it.
fn serve(engine: &Engine, mut client: TcpStream) -> std::io::Result<()> {
    let mut lines = BufReader::new(client.try_clone()?.take(REQUEST_MAX)).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    let name = request.split(' ').nth(1).unwrap_or_default();
    let mut range = None;
    for line in lines {
        let line = line?.to_ascii_lowercase();
        if let Some(text) = line.strip_prefix("range: bytes=") {
            range = Some(text.trim().to_owned());
        }
        if line.is_empty() {
            break;
        }
    }
    let Ok(disk) = engine.disk(name.trim_start_matches('/')) else {
        return write!(
            client,
            "HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\nno such disk\n"
        );
    };
    let Some((first, end)) = bounds(range.as_deref().unwrap_or("0-"), disk.size()) else {
        return write!(
            client,
            "HTTP/1.1 416 Range Not Satisfiable\r\nConnection: close\r\n\r\n"
        );
    };
    write!(
        client,
        "HTTP/1.1 206 Partial Content\r\nConnection: close\r\nContent-Length: {}\r\n\
         Content-Range: bytes {first}-{}/{}\r\n\r\n",
        end - first,
        end - 1,
        disk.size()
    )?;
    send(&disk, first, end, &mut client)
}

/// The first byte of `FIRST-` or `FIRST-LAST`, and the byte behind the last.
fn bounds(range: &str, size: u64) -> Option<(u64, u64)> {
    let (first, last) = range.split_once('-')?;
    let first: u64 = first.parse().ok()?;
    let last = if last.is_empty() {
        size
    } else {
        last.parse::<u64>().ok()?.saturating_add(1)
    };
    let end = last.min(size);
    (first < end).then_some((first, end))
}

/// Reads in whole blocks, and sends what was asked for.
fn send(disk: &Disk, first: u64, end: u64, client: &mut TcpStream) -> std::io::Result<()> {
    let block = u64::from(disk.block_size());
    let mut at = first;
    while at < end {
        let begin = at - at % block;
        let piece = (end.next_multiple_of(block) - begin).min(PIECE);
        let buffer = disk.read(begin, Buffer::new(piece as usize)).wait()?;
        let until = end.min(begin + piece);
        client.write_all(&buffer[(at - begin) as usize..(until - begin) as usize])?;
        at = until;
    }
    Ok(())
}

/// Bytes of a request.
const REQUEST_MAX: u64 = 8 << 10;
/// Bytes of one read: a multiple of every block size.
const PIECE: u64 = 256 << 10;
