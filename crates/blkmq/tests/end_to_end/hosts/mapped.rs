//! Block devices of the device mapper and of null_blk as places for a disk. Most machines have neither: `cargo xtask guest
//! hosts` runs these tests in a guest that does.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::place::{Place, Stored, word, write_sparse};
use crate::common::Scratch;
use crate::common::tools::{installed, run, try_run};

impl Place {
    /// A volume of a thin pool, and another one that can take all of the pool's room. The pool refuses writes at once when it
    /// is full (LVM: `--errorwhenfull y`), and passes discards on to the loop device below it.
    pub(super) fn thin_volume(mut self, scratch: &Scratch, content: &[u8]) -> Option<Self> {
        let (metadata, data) = (
            scratch.image("metadata", 4 << 20),
            scratch.image("pool", POOL_BYTES),
        );
        let [metadata, below] = [
            self.loop_device(&metadata, "512")?,
            self.loop_device(&data, "512")?,
        ];
        let table = format!("thin-pool {metadata} {below} 128 0 1 error_if_no_space");
        let pool = self.mapped(scratch, "pool", POOL_BYTES, &table)?;
        let mut volume = |name: &str, number: u32, bytes: u64| {
            run(
                "dmsetup",
                &["message", word(&pool), "0", &format!("create_thin {number}")],
            );
            let table = format!("thin {} {number}", word(&pool));
            self.mapped(scratch, name, bytes, &table)
        };
        let image = volume("thin", 0, content.len() as u64)?;
        let filler = volume("filler", 1, 2 * POOL_BYTES)?;
        self.thin = Some(Filler { pool, volume: filler });
        self.stored_in = Stored::File(data.into());
        Some(self.on_device(scratch, image, content))
    }

    /// A device that encrypts what it writes to a loop device.
    pub(super) fn encrypted(mut self, scratch: &Scratch, content: &[u8], options: &str) -> Option<Self> {
        let bytes = content.len() as u64;
        let below = scratch.image("below", bytes);
        let device = self.loop_device(&below, "512")?;
        let table = format!("crypt aes-xts-plain64 {} 0 {device} 0 {options}", "5a".repeat(64));
        let image = self.mapped(scratch, "crypt", bytes, table.trim_end())?;
        self.stored_in = Stored::File(below.into());
        // What was never written there is no zero.
        std::fs::write(&image, content).unwrap();
        Some(self.on_device(scratch, image, content))
    }

    /// A device of the kernel that keeps its data in memory.
    pub(super) fn null_blk(mut self, scratch: &Scratch, content: &[u8], discard: &str) -> Option<Self> {
        let name = scratch.name();
        let settings = PathBuf::from("/sys/kernel/config/nullb").join(name);
        if let Err(error) = std::fs::create_dir(&settings) {
            blkmq_testkit::skip(&format!("no null_blk can be made: {error}"));
            return None;
        }
        self.at_end(&["rmdir", word(&settings)]);
        let mebibytes = (content.len() >> 20).to_string();
        for (key, value) in [
            ("size", &*mebibytes),
            ("blocksize", "512"),
            ("memory_backed", "1"),
            ("discard", discard),
            ("power", "1"),
        ] {
            std::fs::write(settings.join(key), value).unwrap_or_else(|error| panic!("{key}: {error}"));
        }
        let statistics = PathBuf::from("/sys/block").join(name).join("stat");
        self.stored_in = Stored::Discarded(statistics);
        let image = PathBuf::from("/dev").join(name);
        Some(self.on_device(scratch, image, content))
    }

    fn on_device(mut self, scratch: &Scratch, image: PathBuf, content: &[u8]) -> Self {
        write_sparse(&image, content);
        self.image = image;
        self.clone = scratch.path("clone.raw");
        self
    }

    /// Makes a device of the device mapper; none, aloud, where that is not possible.
    fn mapped(&mut self, scratch: &Scratch, name: &str, bytes: u64, table: &str) -> Option<PathBuf> {
        if !installed(&["dmsetup"]) {
            return None;
        }
        let name = format!("{}-{name}", scratch.name());
        let table = format!("0 {} {table}", bytes / 512);
        let said = try_run("dmsetup", &["create", &name, "--table", &table]);
        if !said.success {
            blkmq_testkit::skip(&format!(
                "no device can be mapped to {table:?}: {}",
                said.stderr.trim()
            ));
            return None;
        }
        self.at_end(&["dmsetup", "remove", "--retry", &name]);
        Some(PathBuf::from("/dev/mapper").join(name))
    }
}

/// A volume that takes all the room of a thin pool, and gives it back.
pub(super) struct Filler {
    pool: PathBuf,
    volume: PathBuf,
}

impl Filler {
    pub(super) fn fill(&self) {
        let volume = File::options().write(true).open(&self.volume).unwrap();
        let mut at = 0;
        // A write that finds no room is known to have found none when it is written out.
        let write = |at| -> io::Result<()> {
            volume.write_all_at(&[3; BLOCK], at)?;
            volume.sync_data()
        };
        while at < 2 * POOL_BYTES && write(at).is_ok() {
            at += BLOCK as u64;
        }
        assert!(at > 0 && at < POOL_BYTES, "{at} bytes were filled");
    }

    pub(super) fn give_back(&self) {
        run("dmsetup", &["remove", "--retry", word(&self.volume)]);
        run("dmsetup", &["message", word(&self.pool), "0", "delete 1"]);
    }
}

/// Room for a disk of the tests, and not much more.
const POOL_BYTES: u64 = 32 << 20;
/// What a pool gives out at a time.
const BLOCK: usize = 64 << 10;
