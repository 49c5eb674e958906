//! Images of others against the driver: an image that was sound is changed anywhere, opened, read, written, zeroed,
//! grown, flushed and closed, and its bitmaps come and go. Whatever it contains, it is refused, or its requests end.
//!
//! An input begins with the number of its template and the number of changes. A change is an offset of 3 bytes and
//! 8 bytes to put there; what is left are operations of 6 bytes.

use std::path::PathBuf;
use std::sync::OnceLock;

use blkmq_drivers::qcow2::{Header, ImageDisk, NewImage, Qcow2Config, check_refcounts};

/// Runs one input.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    if let Ok(header) = Header::parse(data) {
        assert!(
            (9..=21).contains(&header.cluster_bits) && header.size > 0,
            "{header:?}"
        );
        assert!(
            header.l1_needed(header.size) <= u64::from(header.l1_entries),
            "{header:?}"
        );
    }
    let [template, changes, rest @ ..] = data else {
        return;
    };
    let templates = templates();
    let mut image = templates[usize::from(*template) % templates.len()].clone();
    let (changed, operations) = rest.split_at((usize::from(*changes) * CHANGE).min(rest.len()));
    for change in changed.chunks_exact(CHANGE) {
        let at = u32::from_be_bytes([0, change[0], change[1], change[2]]) as usize % (image.len() - 8);
        image[at..at + 8].copy_from_slice(&change[3..]);
    }
    let path = Scratch::new("hostile");
    std::fs::write(&path.0, &image).expect("room for an image");
    // It may say what it wants: it ends.
    let _ = check_refcounts(&path.0);
    let config = Qcow2Config {
        path: path.0.clone(),
        ..Qcow2Config::default()
    };
    let Ok(disk) = ImageDisk::open(&config) else {
        return;
    };
    let mut memory = vec![7; LEN_MAX];
    for operation in operations.chunks_exact(6).take(OPERATIONS_MAX) {
        let block = u64::from(u32::from_be_bytes([0, operation[1], operation[2], operation[3]]));
        let len = (usize::from(operation[4]) % (LEN_MAX / 512) + 1) * 512;
        let Some(room) = disk.size().checked_sub(len as u64) else {
            continue;
        };
        let offset = block * 512 % (room + 1) / 512 * 512;
        // An error is what a hostile image costs.
        let _ = match operation[0] % OPERATIONS {
            0 => disk.read(offset, &mut memory[..len]),
            1 => disk.write(offset, &memory[..len]),
            2 => disk.write_zeroes(offset..offset + len as u64),
            3 => disk.flush(),
            4 => disk.grow(disk.size() + u64::from(operation[5]) * 512).map(drop),
            5 => disk.extents(offset, 16).map(drop),
            6 => disk.add_bitmap(
                NAMES[usize::from(operation[5]) % 2],
                Some(512 << (operation[4] % 8)),
            ),
            7 => disk.remove_bitmap(NAMES[usize::from(operation[5]) % 2]),
            8 => disk.bitmaps().map(drop),
            _ => {
                disk.close();
                Ok(())
            }
        };
    }
    disk.close();
}

/// Sound images: with the smallest clusters, with usual ones; both with a bitmap; and with subclusters.
fn templates() -> &'static [Vec<u8>] {
    static TEMPLATES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    TEMPLATES.get_or_init(|| {
        let make = |cluster: u32, has_subclusters: bool, has_bitmap: bool| {
            let path = Scratch::new("template");
            let new = NewImage {
                path: path.0.clone(),
                size: Some(256 << 10),
                cluster: Some(cluster),
                has_subclusters,
                base: None,
            };
            new.create().expect("an image can be made");
            let config = Qcow2Config {
                path: path.0.clone(),
                ..Qcow2Config::default()
            };
            let disk = ImageDisk::open(&config).expect("it is sound");
            for at in [0, 65536, 200 << 10] {
                disk.write(at, &[1; 6144]).expect("a write");
            }
            disk.write_zeroes(65536..131_072).expect("zeroing");
            disk.flush().expect("a flush");
            if has_bitmap {
                disk.add_bitmap(NAMES[0], Some(512)).expect("a bitmap");
                disk.write(4096, &[2; 6144]).expect("a write");
                disk.close();
            }
            drop(disk);
            std::fs::read(&path.0).expect("the image")
        };
        vec![
            make(512, false, false),
            make(4096, false, false),
            make(512, false, true),
            make(4096, false, true),
            make(16 << 10, true, false),
        ]
    })
}

/// A file that is removed with this value.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let thread = format!("{:?}", std::thread::current().id());
        let number: String = thread.chars().filter(char::is_ascii_digit).collect();
        let path = std::env::temp_dir().join(format!("blkmq-fuzz-{}-{number}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

const NAMES: [&str; 2] = ["monday", "x"];
const CHANGE: usize = 11;
const OPERATIONS: u8 = 10;
const LEN_MAX: usize = 32 << 10;
const OPERATIONS_MAX: usize = 16;
