//! Tests what the filesystem relies on in FUSE: which requests arrive for a write that must be
//! durable, in each mode of caching, and that a mounted file loses unsynced data.

use std::fs::OpenOptions;
use std::io::{IoSlice, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Duration;

use blkmq_testkit::Scratch;
use blkmq_torture::mount::{Cache, Faults, Mount};
use rustix::io::ReadWriteFlags;

#[test]
fn of_a_durable_write_the_filesystem_sees_a_flag_or_a_sync_or_both() {
    for (cache, buffered, direct) in [
        (Cache::Bypassed, [1, 0], [1, 0]),
        (Cache::Through, [1, 1], [1, 1]),
        (Cache::Back, [0, 1], [1, 1]),
    ] {
        let Some(scene) = Scene::new(cache) else { return };
        for (flags, rw, wanted) in [
            (0, ReadWriteFlags::DSYNC, buffered),
            (libc::O_DSYNC, ReadWriteFlags::empty(), buffered),
            (libc::O_SYNC, ReadWriteFlags::empty(), buffered),
            (libc::O_DIRECT, ReadWriteFlags::DSYNC, direct),
            (libc::O_DIRECT | libc::O_DSYNC, ReadWriteFlags::empty(), direct),
            (0, ReadWriteFlags::empty(), [0, 0]),
            (libc::O_DIRECT, ReadWriteFlags::empty(), [0, 0]),
        ] {
            let seen = scene.write(flags, rw);
            assert_eq!(
                seen, wanted,
                "durable writes and syncs seen: {cache:?}, flags {flags:#o}, {rw:?}"
            );
        }
    }
}

#[test]
fn file_forgets_what_was_not_synced_and_keeps_the_rest_however_it_is_cached() {
    for cache in [Cache::Bypassed, Cache::Through, Cache::Back] {
        let Some(scene) = Scene::new(cache) else { return };
        let open = || {
            OpenOptions::new()
                .read(true)
                .write(true)
                .open(scene.mount.image())
                .unwrap()
        };
        let mut has_forgotten = 0;
        for seed in 0..20 {
            let file = open();
            file.write_all_at(&[1; 4096], 0).unwrap();
            file.write_all_at(&[1; 4096], 8192).unwrap();
            file.sync_data().unwrap();
            file.write_all_at(&[2; 4096], 8192).unwrap();
            drop(file);
            scene.mount.wait_closed(PATIENCE).unwrap();
            scene.mount.forget(seed);
            let (mut kept, mut other) = ([0; 4096], [0; 4096]);
            open().read_exact_at(&mut kept, 0).unwrap();
            open().read_exact_at(&mut other, 8192).unwrap();
            assert_eq!(kept, [1; 4096], "{cache:?}, seed {seed}");
            assert!(
                other.iter().all(|byte| matches!(byte, 1 | 2)),
                "{cache:?}, seed {seed}"
            );
            has_forgotten += u32::from(other.contains(&1));
            scene.mount.wait_closed(PATIENCE).unwrap();
        }
        assert!(
            (5..20).contains(&has_forgotten),
            "{cache:?}: {has_forgotten} of 20 times"
        );
    }
}

#[test]
fn sync_fails_once_and_a_full_filesystem_says_so_when_the_cache_writes_back() {
    let Some(scene) = Scene::new(Cache::Back) else {
        return;
    };
    let mut file = OpenOptions::new().write(true).open(scene.mount.image()).unwrap();
    scene.mount.set_faults(Faults {
        failing_sync: Some(2),
        ..Faults::default()
    });
    let results = [0; 4].map(|_| file.sync_data().is_ok());
    assert_eq!(results, [true, false, true, true]);
    scene.mount.set_faults(Faults {
        room: Some(4096),
        ..Faults::default()
    });
    file.write_all(&[1; 16384]).unwrap();
    let error = file.sync_data().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert!(file.sync_data().is_ok(), "told once");
}

struct Scene {
    mount: Mount,
    /// Dropped after the mount.
    _dir: Scratch,
}

impl Scene {
    /// Mounts the filesystem, or prints why it cannot.
    fn new(cache: Cache) -> Option<Self> {
        let dir = Scratch::new();
        match Mount::new(dir.dir(), 1 << 20, cache) {
            Ok(mount) => Some(Self { mount, _dir: dir }),
            Err(error) => {
                blkmq_testkit::skip(&format!("no FUSE here: {error}"));
                None
            }
        }
    }

    /// Writes a page, and returns how many durable writes and how many syncs arrived for it.
    fn write(&self, flags: i32, rw: ReadWriteFlags) -> [u64; 2] {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(flags);
        let file = options.open(self.mount.image()).unwrap();
        let before = self.mount.arrived();
        let page = Page([7; 4096]);
        rustix::io::pwritev2(&file, &[IoSlice::new(&page.0)], 4096, rw).unwrap();
        let after = self.mount.arrived();
        drop(file);
        self.mount.wait_closed(PATIENCE).unwrap();
        [
            after.durable_writes - before.durable_writes,
            after.syncs - before.syncs,
        ]
    }
}

#[repr(align(4096))]
struct Page([u8; 4096]);

const PATIENCE: Duration = Duration::from_secs(10);
