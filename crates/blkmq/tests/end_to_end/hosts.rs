//! What clients see of a disk on each of the filesystems and devices in the table of `docs/operate/hosts.md`, cell by cell, and
//! that a partition table of 512-byte sectors is found there through each front door, in a clone, and after another daemon
//! has taken over. Where the kernel has no device mapper, null_blk or ublk, `cargo xtask guest hosts` runs these tests.

mod gpt;
mod mapped;
mod place;
mod verify;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use rustix::fs::{AtFlags, CWD, OFlags, StatxFlags, statx};
use rustix::io::Errno;
use serde_json::{Value, json};

use self::gpt::{PARTITIONS, Partition};
use self::place::{Place, word};
use crate::common::daemon::serve_command;
use crate::common::nbd::{Client, Command};
use crate::common::pattern::SECTOR;
use crate::common::tools::{installed, output_within, run, try_run};
use crate::common::{Daemon, Scratch};
use crate::fuse::may_mount;
use blkmq_testkit::vhost_user::{DATA, FrontEnd as Guest};

#[test]
fn disk_on_xfs_is_what_the_page_says() {
    walk("XFS");
}

#[test]
fn disk_on_xfs_on_large_sectors_is_what_the_page_says() {
    walk("XFS on sectors of 4096");
}

#[test]
fn disk_on_ext4_is_what_the_page_says() {
    walk("ext4");
}

#[test]
fn disk_on_ext4_on_large_sectors_is_what_the_page_says() {
    walk("ext4 on sectors of 4096");
}

#[test]
fn disk_on_btrfs_is_what_the_page_says() {
    walk("btrfs");
}

#[test]
fn disk_on_btrfs_without_copies_is_what_the_page_says() {
    walk("btrfs, NOCOW");
}

#[test]
fn disk_on_tmpfs_is_what_the_page_says() {
    walk("tmpfs");
}

#[test]
fn disk_on_an_overlay_is_what_the_page_says() {
    walk("overlay");
}

#[test]
fn disk_on_an_overlay_over_squashfs_is_what_the_page_says() {
    walk("overlay over squashfs");
}

#[test]
fn disk_on_squashfs_is_what_the_page_says() {
    walk("squashfs, `ro=on`");
}

#[test]
fn disk_on_a_loop_device_is_what_the_page_says() {
    walk("a loop device");
}

#[test]
fn disk_on_a_loop_device_with_large_sectors_is_what_the_page_says() {
    walk("a loop device with sectors of 4096");
}

#[test]
fn disk_on_a_thin_volume_is_what_the_page_says() {
    walk("a thin volume");
}

#[test]
fn disk_on_dm_crypt_is_what_the_page_says() {
    walk("dm-crypt");
}

#[test]
fn disk_on_dm_crypt_with_discards_is_what_the_page_says() {
    walk("dm-crypt with `allow_discards`");
}

#[test]
fn disk_on_null_blk_is_what_the_page_says() {
    walk("null_blk");
}

#[test]
fn disk_on_null_blk_with_discards_is_what_the_page_says() {
    walk("null_blk with discard");
}

/// Serves a disk at the place of a row, and finds out what the cells of the row say.
fn walk(row: &str) {
    if !installed(&["nbdinfo", "losetup", "mount", "umount", "cp"]) || !may_mount() {
        return;
    }
    let scratch = Scratch::new();
    let mut content = gpt::disk(DISK_BYTES);
    let Some(mut place) = Place::new(row, &scratch, &content) else {
        return;
    };
    for disk in DISKS {
        place.at_end(&["umount", "--lazy", &scratch.word(&format!("{disk}.fuse"))]);
    }
    let plain = scratch.path("plain.raw");
    std::fs::write(&plain, &content).unwrap();
    let stage = Stage {
        found_by_kernel: found_by_kernel(&plain),
        ublk: ublk_numbers(),
        place,
        scratch,
    };
    let daemon = stage.start(&DISKS[..1], "--upgrade-socket");
    let mut client = stage.client("vm1");
    stage.is_found("vm1", &mut client, &content);
    let mut cells = vec![row.to_owned()];
    let info = stage.info(&daemon, "vm1");
    cells.push(info["block_size_minimum"].to_string());
    let unit = stage.unit(&daemon, &info);

    if !stage.place.is_read_only {
        change(&mut client, &mut content, 1);
    }
    let clones = stage.clone_disk(&mut client);
    let snapshot = content.clone();
    if !stage.place.is_read_only {
        change(&mut client, &mut content, 2);
    }
    let daemon = stage.take_over(daemon);
    stage.is_found("vm1", &mut client, &content);
    let mut client_of_clone = stage.client("vm2");
    stage.is_found("vm2", &mut client_of_clone, &snapshot);
    assert_eq!(stage.info(&daemon, "vm2")["block_size_minimum"], 512, "the clone");

    let info = stage.info(&daemon, "vm1");
    assert_eq!(
        info["block_size_minimum"].to_string(),
        cells[1],
        "after the clone"
    );
    let later = stage.unit(&daemon, &info);
    cells.push(match unit == later {
        true => unit,
        false => format!("{unit}, with a clone {later}"),
    });
    if !stage.place.is_read_only {
        stage.zero(&mut client, &mut content);
    }
    cells.push(stage.trim(&info, &mut client, &mut content).to_owned());
    cells.push(clones.to_owned());
    cells.push(stage.lock().to_owned());
    cells.push(stage.queues());
    cells.push(stage.when_full(&mut client, &mut content).to_owned());
    stage.is_found("vm1", &mut client, &content);
    stage.is_found("vm2", &mut client_of_clone, &snapshot);
    drop((client, client_of_clone));
    daemon.stop();
    let rows = rows();
    let mut expected = rows.into_iter().find(|cells| cells[0] == row);
    if let Some(expected) = &mut expected
        && expected[2].starts_with(&format!("{},", cells[2]))
    {
        // Before Linux 6.14 XFS does not say what it needs with a clone, and does what is smaller by itself.
        expected[2].clone_from(&cells[2]);
    }
    assert_eq!(Some(cells), expected, "{PAGE}");
}

/// Writes single sectors and odd numbers of them into both partitions.
fn change(client: &mut Client, content: &mut [u8], value: u8) {
    for partition in PARTITIONS {
        for (sector, sectors) in [(1, 1), (9, 3), (23, 17), (2048, 1)] {
            let sector = partition.start + sector + u64::from(value) * 64;
            let own = sector as usize * SECTOR..(sector + sectors) as usize * SECTOR;
            content[own.clone()].fill(value);
            client.write(own.start as u64, &content[own]).unwrap();
        }
    }
}

/// A disk at a place.
struct Stage {
    /// What the kernel finds in a file with the disk's content: some kernels do not know GPTs.
    found_by_kernel: Vec<Partition>,
    /// The numbers of the disks as block devices of the host, if they are.
    ublk: Option<[u32; 2]>,
    /// Before the directory that it lies in, so that nothing is mounted there any more when that is removed.
    place: Place,
    scratch: Scratch,
}

impl Stage {
    /// Starts a daemon that serves these disks at all front doors.
    fn start(&self, disks: &[&str], upgrade: &str) -> Daemon {
        let address = |name: &str| format!("unix:{}", self.scratch.word(name));
        let mut words = vec!["--fuse-io-uring".to_owned(), "off".to_owned()];
        for (door, at) in [
            ("--nbd", address("nbd.sock")),
            ("--vhost-user", address("{disk}.sock")),
            ("--fuse", self.scratch.word("{disk}.fuse")),
            ("--control", address("control.sock")),
            (upgrade, address("up.sock")),
        ] {
            words.extend([door.to_owned(), at]);
        }
        if let Some(numbers) = self.ublk {
            let exports = numbers
                .iter()
                .zip(disks)
                .map(|(number, disk)| format!("[[export]]\nublk = \"{number}\"\ndisks = [\"{disk}\"]\n"));
            let config = self.scratch.word("blkmq.toml");
            std::fs::write(&config, exports.collect::<String>()).unwrap();
            words.extend(["--config".to_owned(), config]);
        }
        for (disk, path) in disks.iter().zip([&self.place.image, &self.place.clone]) {
            let access = if self.place.is_read_only { ",ro=on" } else { "" };
            words.extend([
                "--disk".to_owned(),
                format!("name={disk},file={}{access}", word(path)),
            ]);
        }
        Daemon::start(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Has another daemon take over, which serves the clone, too.
    fn take_over(&self, mut old: Daemon) -> Daemon {
        let new = self.start(&DISKS, "--take-over");
        assert!(old.ended_within(TIME).success(), "{}", old.said());
        new
    }

    fn client(&self, disk: &str) -> Client {
        Client::connect(&self.scratch.path("nbd.sock"), disk).unwrap()
    }

    fn info(&self, daemon: &Daemon, disk: &str) -> Value {
        let said = run("nbdinfo", &["--json", &daemon.uri(disk)]);
        serde_json::from_str::<Value>(&said.stdout).unwrap()["exports"][0].clone()
    }

    /// What direct I/O needs, unless the daemon does without. Clients are told of no less.
    fn unit(&self, daemon: &Daemon, info: &Value) -> String {
        if daemon.said().contains("disk.raw\": goes through the page cache") {
            return "page cache".to_owned();
        }
        let unit = needed_by_direct_io(&self.place.image);
        assert!(
            info["block_size_preferred"].as_u64() >= Some(unit.into()),
            "{info}"
        );
        unit.to_string()
    }

    /// Checks every byte of a disk over NBD, FUSE and ublk, what a guest reads of its table, and which partitions the kernel
    /// finds.
    fn is_found(&self, disk: &str, client: &mut Client, content: &[u8]) {
        assert_eq!(gpt::partitions(content).unwrap(), PARTITIONS);
        for (at, expected) in (0..).step_by(CHUNK).zip(content.chunks(CHUNK)) {
            assert!(
                client.read(at as u64, CHUNK).unwrap() == expected,
                "{disk}, NBD, MiB {}",
                at >> 20
            );
        }
        let file = self.scratch.path(&format!("{disk}.fuse"));
        assert!(
            read_direct(&file, 0, DISK_BYTES).unwrap() == content,
            "{disk}, FUSE"
        );
        assert_eq!(found_by_kernel(&file), self.found_by_kernel, "{disk}");
        if let Some(numbers) = self.ublk {
            let number = DISKS.iter().position(|name| *name == disk).unwrap();
            let device = format!("ublkb{}", numbers[number]);
            let read = read_direct(&Path::new("/dev").join(&device), 0, DISK_BYTES);
            assert!(read.unwrap() == content, "{disk}, ublk");
            if !self.place.has_large_sectors {
                assert_eq!(partitions_of(&device), self.found_by_kernel, "{disk}, ublk");
            }
        }
        if !self.place.has_large_sectors {
            self.is_found_by_guest(disk, content);
        }
    }

    /// Checks a guest's reads of the table and of a partition.
    fn is_found_by_guest(&self, disk: &str, content: &[u8]) {
        let guest = Guest::connect(&self.scratch.path(&format!("{disk}.sock")));
        guest.start();
        let table = [1, 2, PARTITIONS[1].start];
        for (head, sector) in [0, 3, 6].into_iter().zip(table) {
            guest.request(head, IN, sector);
        }
        guest.offer(&[0, 3, 6]);
        guest.used(3);
        for (head, sector) in [0, 3, 6].into_iter().zip(table) {
            assert_eq!(guest.status(head), 0, "{disk}, a guest, sector {sector}");
            let found = guest.read::<SECTOR>(DATA + 4096 * u64::from(head) + 512);
            assert!(
                found == content[sector as usize * SECTOR..][..SECTOR],
                "{disk}, a guest"
            );
        }
    }

    /// Clones the disk while it is served. Returns what the clone is.
    fn clone_disk(&self, client: &mut Client) -> &'static str {
        if !self.place.is_read_only {
            client.flush().unwrap();
        }
        let [image, clone] = [&self.place.image, &self.place.clone].map(|path| word(path));
        if try_run("cp", &["--reflink=always", image, clone]).success {
            return "shares blocks";
        }
        run("cp", &["--reflink=auto", image, clone]);
        "a copy"
    }

    /// Whether a second daemon is kept from the file.
    fn lock(&self) -> &'static str {
        let nbd = format!("unix:{}", self.scratch.word("second.sock"));
        let access = if self.place.is_read_only { ",ro=on" } else { "" };
        let disk = format!("name=vm1,file={}{access}", word(&self.place.image));
        let words = ["--disk", &disk, "--nbd", &nbd, "--control", "none", "--check"];
        let mut command = serve_command(&words);
        let output = output_within(command.stdin(Stdio::null()), TIME);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        match said.contains("in use by blkmq") {
            true => "one writer",
            false => "readers only",
        }
    }

    /// The kind of the queue, and whether the clone is on it.
    fn queues(&self) -> String {
        let mut control = Control::connect(&self.scratch.path("control.sock")).expect("it is served");
        let disks = control.call("disk.list", &json!({})).expect("an answer");
        let queue = |name: &str| {
            let disk = disks.as_array()?.iter().find(|disk| disk["name"] == name)?;
            Some(disk["queue"].as_str()?.to_owned())
        };
        let (own, of_clone) = (queue("vm1").unwrap(), queue("vm2").unwrap());
        // The clone is elsewhere where none can be made beside the disk.
        if self.place.fillable.is_some() {
            assert_eq!(own, of_clone);
        }
        format!("`{}-…`", own.split('-').next().unwrap())
    }

    /// Zeroes the data that is in no partition, with and without holes.
    fn zero(&self, client: &mut Client, content: &mut [u8]) {
        for flags in [0, NO_HOLE] {
            let own = DATA_AT..DATA_AT + CHUNK;
            content[own.clone()].fill(4);
            client.write(own.start as u64, &content[own.clone()]).unwrap();
            let cookie = client.send(Command::WriteZeroes, flags, own.start as u64, CHUNK as u32, &[]);
            assert_eq!(client.reply().unwrap(), cookie.unwrap());
            content[own.clone()].fill(0);
            let found = client.read(own.start as u64, CHUNK).unwrap();
            assert!(found == content[own], "zeroes, flags {flags}");
        }
    }

    /// Whether a discard frees blocks.
    fn trim(&self, info: &Value, client: &mut Client, content: &mut [u8]) -> &'static str {
        if info["can_trim"] != true {
            return "no";
        }
        let own = DATA_AT..DATA_AT + CHUNK;
        content[own.clone()].fill(5);
        client.write(own.start as u64, &content[own.clone()]).unwrap();
        client.flush().unwrap();
        let before = self.place.stored_in.sectors();
        let cookie = client.send(Command::Trim, 0, own.start as u64, CHUNK as u32, &[]);
        assert_eq!(client.reply().unwrap(), cookie.unwrap());
        client.flush().unwrap();
        let freed = self.place.stored_in.freed_since(before);
        // What is read there now is nobody's business.
        client.write(own.start as u64, &content[own]).unwrap();
        match freed * SECTOR as u64 >= CHUNK as u64 / 2 {
            true => "frees blocks",
            false => "frees nothing",
        }
    }

    /// What becomes of writes while the filesystem has no room.
    fn when_full(&self, client: &mut Client, content: &mut [u8]) -> &'static str {
        if !self.place.is_bounded() {
            return "";
        }
        let own = DATA_AT..DATA_AT + 4096;
        content[own.clone()].fill(6);
        client.write(own.start as u64, &content[own.clone()]).unwrap();
        // Some overlays copy holes as zeroes.
        let cookie = client.send(Command::Trim, 0, HOLE_AT as u64, CHUNK as u32, &[]);
        assert_eq!(client.reply().unwrap(), cookie.unwrap());
        client.flush().unwrap();
        self.place.fill();
        let no_room = Some(Errno::NOSPC.raw_os_error());
        let mut write = |at: usize, data: &[u8]| {
            client
                .write(at as u64, data)
                .map_err(|error| error.raw_os_error())
        };
        assert_eq!(write(HOLE_AT, &[7; CHUNK]), Err(no_room));
        content[own.clone()].fill(8);
        let over = write(own.start, &content[own.clone()]);
        self.place.give_back();
        // Some give room back a while after a file has gone.
        let begun = Instant::now();
        content[HOLE_AT..HOLE_AT + CHUNK].fill(7);
        while write(HOLE_AT, &content[HOLE_AT..HOLE_AT + CHUNK]) == Err(no_room) {
            assert!(begun.elapsed() < TIME, "it stays full");
            std::thread::sleep(Duration::from_millis(50));
        }
        write(own.start, &content[own]).unwrap();
        client.flush().unwrap();
        match over {
            Ok(()) => "new blocks: ENOSPC",
            Err(error) => {
                assert_eq!(error, no_room);
                "every write: ENOSPC"
            }
        }
    }
}

/// Numbers of devices of ublk that no other test has; none where the kernel has no such devices.
fn ublk_numbers() -> Option<[u32; 2]> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let is_there = Path::new("/dev/ublk-control").exists();
    // Relaxed: the numbers must only differ.
    let first = NEXT.fetch_add(2, Ordering::Relaxed);
    is_there.then_some([first, first + 1])
}

/// What the kernel says that direct I/O needs, or else whether it can read a sector.
fn needed_by_direct_io(path: &Path) -> u32 {
    let found = statx(CWD, path, AtFlags::empty(), StatxFlags::DIOALIGN).unwrap();
    if StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::DIOALIGN) {
        return found.stx_dio_offset_align;
    }
    match read_direct(path, SECTOR as u64, SECTOR) {
        Ok(_) => SECTOR as u32,
        Err(_) => 4096,
    }
}

/// Reads from a file past the page cache.
fn read_direct(path: &Path, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let mut options = File::options();
    let file = options.read(true).custom_flags(OFlags::DIRECT.bits() as i32);
    let mut memory = vec![0; bytes + 4096];
    let skip = memory.as_ptr().align_offset(4096);
    file.open(path)?
        .read_exact_at(&mut memory[skip..skip + bytes], at)?;
    memory.drain(..skip);
    memory.truncate(bytes);
    Ok(memory)
}

/// The partitions that the kernel finds in a file, by a loop device with sectors of 512 bytes.
fn found_by_kernel(path: &Path) -> Vec<Partition> {
    let words = ["--find", "--show", "--partscan", "--read-only", word(path)];
    let device = run("losetup", &words).stdout.trim().to_owned();
    let found = partitions_of(device.trim_start_matches("/dev/"));
    run("losetup", &["--detach", &device]);
    found
}

/// The partitions of a block device, by its name.
fn partitions_of(name: &str) -> Vec<Partition> {
    let read = |partition: &PathBuf, key: &str| {
        let text = std::fs::read_to_string(partition.join(key)).ok()?;
        text.trim().parse().ok()
    };
    let partitions = (1..).map(|number| PathBuf::from(format!("/sys/block/{name}/{name}p{number}")));
    let found = partitions.map_while(|partition| {
        Some(Partition {
            start: read(&partition, "start")?,
            sectors: read(&partition, "size")?,
        })
    });
    found.collect()
}

/// The rows of the page's table, without its head.
fn rows() -> Vec<Vec<String>> {
    let lines = include_str!("../../../../docs/operate/hosts.md").lines();
    let lines = lines.skip_while(|line| !line.starts_with("| disk in |"));
    let rows = lines.skip(2).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| {
        let cells = line.trim_matches('|').split('|');
        cells.map(|cell| cell.trim().to_owned()).collect()
    };
    rows.map(cells).collect()
}

#[test]
fn page_of_hosts_has_no_row_that_no_test_walks() {
    let source = include_str!("hosts.rs");
    let rows = rows();
    assert!(rows.len() > 9, "{rows:?}");
    for row in rows {
        assert!(source.contains(&format!("walk({:?})", row[0])), "{}", row[0]);
    }
}

const PAGE: &str = "docs/operate/hosts.md";
const DISKS: [&str; 2] = ["vm1", "vm2"];
const DISK_BYTES: usize = 16 << 20;
const CHUNK: usize = 1 << 20;
/// NBD_CMD_FLAG_NO_HOLE.
const NO_HOLE: u16 = 1 << 1;
/// In no partition: data that is trimmed and written again, and a hole.
const DATA_AT: usize = 9 << 20;
const HOLE_AT: usize = 12 << 20;
/// A guest's read.
const IN: u32 = 0;
const TIME: Duration = Duration::from_secs(20);
