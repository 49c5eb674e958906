//! The long help of `serve`: the keys of disks, groups and front doors. Those of drivers and front doors are
//! as their registries have them.

use blkmq_drivers::registry::Registry;
use blkmq_export::front_door::FRONT_DOORS;
use blkmq_export::keys::Key;

/// What stands below the flags of `serve`.
pub(crate) fn of_serve() -> String {
    let mut text = OF_EVERY_DISK.to_owned();
    for driver in Registry::default().iter() {
        let page = format!("{}; docs/drivers/{}.md", driver.help, driver.name);
        entry(&mut text, &format!("  {}={}", driver.name, driver.value), &page);
        for key in driver.keys {
            let help = format!("{} [default: {}]", key.help, key.default);
            entry(&mut text, &format!("    {}", key.name), &help);
        }
    }
    text += ON_DISKS;
    for door in FRONT_DOORS {
        let of_addresses = door.keys().iter().copied().flatten();
        door_keys(&mut text, &format!("{} in [[export]]", door.name()), of_addresses);
        door_keys(&mut text, &format!("[{}]", door.name()), door.table_keys());
    }
    text + ENDING
}

fn door_keys(text: &mut String, head: &str, keys: impl IntoIterator<Item = &'static Key>) {
    let mut keys = keys.into_iter().filter(|key| key.flag.is_none()).peekable();
    if keys.peek().is_some() {
        *text += &format!("  {head}\n");
    }
    for key in keys {
        entry(text, &format!("    {}", key.name), &key.line());
    }
}

/// Adds an entry: what it is about, and its lines beside and below.
fn entry(text: &mut String, head: &str, help: &str) {
    let mut line = format!("{head:COLUMN$}");
    if head.len() >= COLUMN {
        *text += &(line + "\n");
        line = " ".repeat(COLUMN);
    }
    for word in help.split_whitespace() {
        if line.chars().count() + word.chars().count() > WIDTH {
            *text += &(line.trim_end().to_owned() + "\n");
            line = " ".repeat(COLUMN);
        }
        let space = if line.ends_with(' ') { "" } else { " " };
        line += &format!("{space}{word}");
    }
    *text += &(line + "\n");
}

/// Where the second column begins.
const COLUMN: usize = 21;
/// Where lines end.
const WIDTH: usize = 84;

const OF_EVERY_DISK: &str = "\
Keys of every disk:
  name=NAME          what clients ask for (needed)
  ro=on              read-only
  block_size=BYTES   512 to 65536, a power of two [default: the drive's]
  queue=NAME         the request queue it is on [default: its drive's]
  sched=NAME         the scheduler of its queue, as for --sched
                     [default: --sched]
  io_poll=on         poll for completions of its queue; for files, and for null
                     disks with poll_queues [default: on for the latter]
  io_poll_delay=N    µs to sleep before polling for a request: -1 none, 0 half of
                     the mean, auto as predicted, cautious as predicted but only
                     where hardly any sleeper is late [default: auto]
  group=/PATH        the group to which its I/O is accounted [default: /NAME]
  serial=TEXT        the serial number that guests find, at most 20 bytes
                     [default: NAME, or a digest of it]
  export=TEXT        the name over NBD [default: NAME]
  description=TEXT   a text for people who list the exports
A comma in a value is written \\, as in file=a\\,b.raw.
What it lies on, one of these, each with keys of its own:
";

const ON_DISKS: &str = "  linear=DISKS       other disks, one after the other
  striped=DISKS      other disks, in alternating chunks
    chunk            a power of two [default: 64K]
  multipath=PATHS    other disks that are paths to the same one, as in a+b:2/c: b
                     carries twice as much as a, and c all when both have failed;
                     docs/mappers/multipath.md
    selector         round-robin, queue-length, service-time,
                     historical-service-time, io-affinity [default: service-time]
    failback         immediate, manual or a time [default: immediate]
    queue_if_no_path hold requests while no path works, always or for a time
                     [default: off, they fail]
    check_interval   between probes of a failed path [default: 1s]
    check_timeout    how long a probe may take [default: 5s]
  luks=DISK          another disk, encrypted as cryptsetup does; docs/mappers/luks.md
    key              the file with the passphrase, or fd:NUMBER, cred:NAME
                     [default: none, it is locked]
    header           a file with a detached header
    discard          on: discards pass [default: off]
DISKS are names with + between, as in linear=a+b:1G:512M (of b, 512M from 1G on);
see docs/mappers. A disk on which another one lies is served only where an export
names it.
Keys of a group, after its path:
  weight=N           its share against its siblings, 1 to 1000 [default: 100]
  bps=SIZE           maximum bytes per second; also read_bps, write_bps
  iops=N             maximum I/Os per second; also read_iops, write_iops
  CAP_burst=N        how much more may pass at once after a pause, for each of
                     these six: bps_burst=N and so on
  latency_target=T   time that nine of ten of its I/Os should take at most
Keys of front doors in the configuration file, beside those that have flags:
";

const ENDING: &str = "\
Sizes are bytes, or a number with K, M, G or T (powers of 1024).

Files on one filesystem or disk share a queue, because they share a drive, so
one scheduler sees all tenants of the drive.

For each disk and address the daemon prints a line for its clients, then `ready`.
On SIGTERM or SIGINT it finishes the requests in flight and exits with 0; a second
signal ends it at once. SIGUSR1 writes the statistics to the log. SIGHUP reads the
configuration file again and applies the differences.

Examples:
  blkmq serve --disk name=vm1,file=vm1.raw,size=8G,create=on --nbd unix:/run/vm1.sock
  blkmq serve --disk name=a,ram=1G --disk name=b,ram=1G --nbd tcp:127.0.0.1:10809
  qemu-system-x86_64 -drive 'file=nbd+unix:///vm1?socket=/run/vm1.sock,format=raw'";
