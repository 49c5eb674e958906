//! Entries of systemd's journal in its own protocol, a datagram of fields for each message, so that
//! `journalctl BLKMQ_DISK=vm1` finds what is about a disk. The [log](super::Log) sends them; `subjects` knows to which
//! disk a file and to which group a disk belongs.

use std::fmt::{self, Debug};
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::Context;

use super::Log;
use super::format::priority;
use super::subjects::{self, Subject};

/// The socket of a journal.
#[derive(Debug)]
pub struct Socket {
    own: UnixDatagram,
    path: PathBuf,
}

impl Socket {
    /// The journal of this host, or the one that `BLKMQ_JOURNAL` names. None if nobody is there.
    pub fn of_environment() -> Option<Self> {
        let path = std::env::var_os("BLKMQ_JOURNAL").map_or_else(|| SOCKET.into(), PathBuf::from);
        Self::open(&path).ok()
    }

    fn open(path: &Path) -> io::Result<Self> {
        // Only to see that somebody is there: each entry names the socket, which may be another one later.
        UnixDatagram::unbound()?.connect(path)?;
        Ok(Self {
            own: UnixDatagram::unbound()?,
            path: path.to_owned(),
        })
    }
}

impl Write for Socket {
    /// Sends one entry, whole. Waits while the journal takes none.
    fn write(&mut self, entry: &[u8]) -> io::Result<usize> {
        self.own.send_to(entry, &self.path)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes an entry of each event and gives it to a log.
#[derive(Debug)]
pub struct Entries(pub Log);

impl<S: Subscriber> Layer<S> for Entries {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut entry = Entry::new(*event.metadata().level());
        event.record(&mut entry);
        self.0.push(entry.finish());
    }
}

/// An entry under construction.
pub(super) struct Entry {
    bytes: Vec<u8>,
    /// What its fields say it is about.
    about: Subject,
}

impl Entry {
    pub(super) fn new(level: Level) -> Self {
        let mut entry = Self {
            bytes: Vec::new(),
            about: Subject::default(),
        };
        entry.field("PRIORITY", &priority(level).to_string());
        entry.field("SYSLOG_IDENTIFIER", "blkmq");
        entry
    }

    /// An entry that no event belongs to.
    pub(super) fn of_message(level: Level, text: &str) -> Vec<u8> {
        let mut entry = Self::new(level);
        entry.field("MESSAGE", text);
        entry.bytes
    }

    /// Adds what is known of its subject.
    fn finish(mut self) -> Vec<u8> {
        let known = subjects::complete(std::mem::take(&mut self.about));
        let fields = [
            ("BLKMQ_DISK", known.disk),
            ("BLKMQ_GROUP", known.group),
            ("BLKMQ_EXPORT", known.export),
            ("BLKMQ_SOURCE", known.source),
        ];
        for (name, value) in fields {
            value.iter().for_each(|value| self.field(name, value));
        }
        self.bytes
    }

    fn field(&mut self, name: &str, value: &str) {
        self.bytes.extend(name.as_bytes());
        match value.contains('\n') {
            false => self.bytes.push(b'='),
            true => {
                self.bytes.push(b'\n');
                self.bytes.extend((value.len() as u64).to_le_bytes());
            }
        }
        self.bytes.extend(value.as_bytes());
        self.bytes.push(b'\n');
    }
}

impl Visit for Entry {
    fn record_str(&mut self, field: &Field, value: &str) {
        let place = match field.name() {
            "disk" => &mut self.about.disk,
            "group" => &mut self.about.group,
            "export" => &mut self.about.export,
            "source" => &mut self.about.source,
            "message" => return self.field("MESSAGE", value),
            name => return self.field(&format!("BLKMQ_{}", name.to_ascii_uppercase()), value),
        };
        *place = Some(value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.bytes))
    }
}

/// Where journald listens, also for services with a journal of their own (`LogNamespace=`).
const SOCKET: &str = "/run/systemd/journal/socket";

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;
    use crate::log::format::Format;

    #[test]
    fn entry_has_the_fields_of_its_event_and_a_line_break_changes_no_other() {
        let dir = std::env::temp_dir().join(format!("blkmq-journal-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("socket");
        let journal = UnixDatagram::bind(&path).unwrap();
        let log = Log::new(Socket::open(&path).unwrap(), Format::Entries);
        log.start().unwrap();
        let subscriber = tracing_subscriber::registry().with(Entries(log.clone()));
        tracing::subscriber::with_default(subscriber, || {
            tracing::warn!(
                disk = "d1",
                client = Some("process 7"),
                count = 3,
                "a\nPRIORITY=0"
            );
        });
        log.print(Level::ERROR, "b");
        let mut entry = [0; 512];
        let bytes = journal.recv(&mut entry).unwrap();
        let mut wanted =
            b"PRIORITY=4\nSYSLOG_IDENTIFIER=blkmq\nMESSAGE\n\x0c\0\0\0\0\0\0\0a\nPRIORITY=0\n".to_vec();
        wanted.extend(b"BLKMQ_CLIENT=process 7\nBLKMQ_COUNT=3\nBLKMQ_DISK=d1\n");
        assert_eq!(
            String::from_utf8_lossy(&entry[..bytes]),
            String::from_utf8_lossy(&wanted)
        );
        let bytes = journal.recv(&mut entry).unwrap();
        assert_eq!(
            &entry[..bytes],
            b"PRIORITY=3\nSYSLOG_IDENTIFIER=blkmq\nMESSAGE=b\n"
        );
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
