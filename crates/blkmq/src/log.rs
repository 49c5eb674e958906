//! The way of messages to standard error: the sender puts a message into a bounded queue and
//! continues, and a thread of its own writes. A full disk, a closed pipe or one without a reader
//! costs messages, which are counted, and nothing else. `main` installs it for `tracing`; `serve`
//! prints its statistics through it.

pub mod filter;
pub mod format;
pub mod journal;
pub(crate) mod subjects;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::VecDeque;
use std::env::VarError;
use std::fmt;
use std::io::{self, ErrorKind, Write};
use std::panic;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use tracing::Level;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use self::format::Format;

/// A handle of the log; clones share one log.
#[derive(Clone)]
pub struct Log(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    /// The queue has changed: there is something to write, or less.
    changed: Condvar,
    /// Replaces the filter of what is logged.
    filter: OnceLock<SetFilter>,
    /// Taken by the thread that writes.
    sink: Mutex<Option<Box<dyn Write + Send>>>,
    format: Format,
}

type SetFilter = Box<dyn Fn(EnvFilter) -> anyhow::Result<()> + Send + Sync>;

/// Messages that are not written yet.
#[derive(Default)]
struct Queue {
    messages: VecDeque<Message>,
    /// Bytes of all messages except the one that is being written.
    bytes: usize,
    /// Messages dropped for lack of room since the last one that fitted.
    lost: u64,
    is_writing: bool,
}

/// One message, whole lines.
#[derive(Default)]
struct Message {
    text: Vec<u8>,
    /// Messages that belong before it and were dropped.
    lost_before: u64,
}

impl Log {
    /// A log in this format that keeps messages until it [writes](Self::start) them to `sink`.
    pub fn new(sink: impl Write + Send + 'static, format: Format) -> Self {
        Self(Arc::new(Shared {
            queue: Mutex::default(),
            changed: Condvar::new(),
            filter: OnceLock::new(),
            sink: Mutex::new(Some(Box::new(sink))),
            format,
        }))
    }

    /// Starts the thread that writes, which may do what the calling one may do, and runs as long as the process. Later
    /// calls change nothing.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(&self) -> io::Result<()> {
        let sink = self.0.sink.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(sink) = sink else { return Ok(()) };
        let shared = Arc::clone(&self.0);
        let thread = thread::Builder::new().name("log".to_owned());
        thread.spawn(move || shared.write_to(sink)).map(drop)
    }

    /// Sets the function that replaces the filter of what is logged.
    pub fn take_filter(&self, set: impl Fn(EnvFilter) -> anyhow::Result<()> + Send + Sync + 'static) {
        // The first one stays.
        let _ = self.0.filter.set(Box::new(set));
    }

    /// Sets a filter of what is logged from now on, in the form of `BLKMQ_LOG`.
    ///
    /// # Errors
    /// The filter is invalid.
    pub fn set_filter(&self, filter: &str) -> anyhow::Result<()> {
        let Some(set) = self.0.filter.get() else {
            anyhow::bail!("the log has no filter");
        };
        set(filter::parse(filter)?).with_context(|| format!("filter {filter:?} rejected"))
    }

    /// Reports panics of all threads through the log, so that a panicking thread does not wait for
    /// the sink either.
    pub fn take_panics(&self) {
        let log = self.clone();
        panic::set_hook(Box::new(move |panicked| {
            let thread = thread::current();
            let name = thread.name().unwrap_or("without a name");
            let trace = Backtrace::capture();
            let mut text = format!("thread {name}: {panicked}");
            if trace.status() == BacktraceStatus::Captured {
                text += &format!("\n{trace}");
            }
            log.print(Level::ERROR, &text);
            let _ = log.start();
            log.finish(PANIC_WAIT_MAX);
        }));
    }

    /// Writes a message that no filter applies to, if there is room for it. Does not wait.
    pub fn print(&self, level: Level, text: &str) {
        self.push(self.0.format.message(level, text));
    }

    /// Writes a message for each line of a text, and waits for room for each until `limit` has passed. For threads that serve
    /// nobody.
    pub fn print_long(&self, level: Level, text: &str, limit: Duration) {
        let end = Instant::now() + limit;
        for line in text.lines() {
            let message = self.0.format.message(level, line);
            self.wait(end, |queue| queue.has_room(message.len()));
            self.push(message);
        }
    }

    /// Waits until everything is written, or `limit` has passed.
    pub fn finish(&self, limit: Duration) {
        self.wait(Instant::now() + limit, |queue| {
            queue.messages.is_empty() && queue.lost == 0 && !queue.is_writing
        });
    }

    fn push(&self, text: Vec<u8>) {
        let mut queue = self.0.lock();
        if !queue.has_room(text.len()) {
            queue.lost += 1;
            return;
        }
        queue.bytes += text.len();
        let lost_before = std::mem::take(&mut queue.lost);
        queue.messages.push_back(Message { text, lost_before });
        drop(queue);
        self.0.changed.notify_all();
    }

    fn wait(&self, end: Instant, is_over: impl Fn(&Queue) -> bool) {
        let left = end.saturating_duration_since(Instant::now());
        let waited = self
            .0
            .changed
            .wait_timeout_while(self.0.lock(), left, |queue| !is_over(queue));
        drop(waited);
    }
}

impl Queue {
    fn has_room(&self, bytes: usize) -> bool {
        self.bytes + bytes <= QUEUE_BYTES_MAX && self.messages.len() < MESSAGES_MAX
    }

    /// The next message; one without text if only the number of dropped ones is to be reported.
    fn next(&mut self) -> Option<Message> {
        if let Some(message) = self.messages.pop_front() {
            self.bytes -= message.text.len();
            return Some(message);
        }
        let lost_before = std::mem::take(&mut self.lost);
        (lost_before > 0).then(|| Message {
            lost_before,
            ..Message::default()
        })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics while it holds the lock; if something did, the queue would still be
        // consistent.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_next(&self) -> Message {
        let mut queue = self.lock();
        queue.is_writing = false;
        self.changed.notify_all();
        loop {
            if let Some(message) = queue.next() {
                queue.is_writing = true;
                return message;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn write_to(&self, mut sink: impl Write) {
        // Dropped messages that are not reported yet, with the reason if writing failed.
        let (mut lost, mut why) = (0, None);
        loop {
            let message = self.take_next();
            lost += message.lost_before;
            if lost > 0 {
                let line = self.format.message(Level::WARN, &lost_line(lost, why.as_ref()));
                match put(&mut sink, &line) {
                    Ok(()) => (lost, why) = (0, None),
                    Err(error) => {
                        lost += u64::from(!message.text.is_empty());
                        why = Some(error);
                        continue;
                    }
                }
            }
            if let Err(error) = put(&mut sink, &message.text) {
                (lost, why) = (1, Some(error));
            }
        }
    }
}

/// The line that replaces dropped messages.
fn lost_line(lost: u64, why: Option<&io::Error>) -> String {
    match why {
        Some(error) => format!("log: {lost} messages are missing here: writing them failed: {error}"),
        None => format!("log: {lost} messages are missing here: nobody took those before them"),
    }
}

/// Writes all of it, however long that takes: the sink may be a socket or a terminal that somebody
/// made non-blocking.
fn put(sink: &mut impl Write, mut text: &[u8]) -> io::Result<()> {
    while !text.is_empty() {
        match sink.write(text) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(bytes) => text = &text[bytes..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(RETRY),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

impl Write for Log {
    /// Takes one message, whole. Never fails.
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.push(text.to_vec());
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Log")
    }
}

/// A setting of the log in the environment; empty without it.
fn setting(name: &str) -> anyhow::Result<String> {
    match std::env::var(name) {
        Err(VarError::NotPresent) => Ok(String::new()),
        value => value.with_context(|| format!("environment: {name}")),
    }
}

/// Limits of what waits to be written, in bytes and in messages: some minutes of the most that the
/// limits of single messages permit.
const QUEUE_BYTES_MAX: usize = 256 << 10;
const MESSAGES_MAX: usize = 4096;
/// How long a panicking thread waits until its message is written.
const PANIC_WAIT_MAX: Duration = Duration::from_secs(1);
/// How long to wait for a sink that would block.
const RETRY: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A sink that takes something only when it is told what to answer.
    struct Told {
        answers: mpsc::Receiver<io::Result<()>>,
        seen: mpsc::Sender<String>,
    }

    impl Write for Told {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            // A test that is over answers no more.
            self.answers.recv().unwrap_or(Ok(()))?;
            let _ = self.seen.send(String::from_utf8_lossy(text).into_owned());
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn told() -> (Log, mpsc::Sender<io::Result<()>>, mpsc::Receiver<String>) {
        let ((tell, answers), (seen, see)) = (mpsc::channel(), mpsc::channel());
        let log = Log::new(Told { answers, seen }, Format::Text);
        log.start().unwrap();
        (log, tell, see)
    }

    #[test]
    fn messages_without_room_are_counted_and_reported_in_their_place() {
        let (log, tell, see) = told();
        // Nobody takes anything: this must end all the same.
        for number in 0..2 * MESSAGES_MAX {
            log.print(Level::INFO, &format!("message {number}"));
        }
        let mut took = 0;
        // The first may be in the thread's hands already, and so the queue has room for one more.
        while took < MESSAGES_MAX {
            tell.send(Ok(())).unwrap();
            assert_eq!(see.recv().unwrap(), format!("message {took}\n"));
            took += 1;
        }
        drop(tell);
        log.print(Level::INFO, "later");
        // They may be missing in two places: before and behind the one that found the room of the first.
        let rest: Vec<String> = see.iter().take_while(|line| line != "later\n").collect();
        let said = rest.iter().filter(|line| line.contains("messages are missing"));
        let lost: usize = said
            .map(|line| line.split(' ').nth(1).unwrap().parse::<usize>().unwrap())
            .sum();
        assert!((MESSAGES_MAX - 1..=MESSAGES_MAX).contains(&lost), "{rest:?}");
    }

    #[test]
    fn failed_write_costs_the_message_and_is_told_when_writing_works_again() {
        let (log, tell, see) = told();
        for number in 0..5 {
            log.print(Level::INFO, &format!("message {number}"));
        }
        let full = || Err(ErrorKind::StorageFull.into());
        // The first is written; the next fails, then so does the line about it, twice.
        for answer in [Ok(()), full(), full(), full()] {
            tell.send(answer).unwrap();
        }
        drop(tell);
        let lines: Vec<String> = see.iter().take(3).collect();
        assert_eq!(
            (lines[0].as_str(), lines[2].as_str()),
            ("message 0\n", "message 4\n")
        );
        assert!(lines[1].contains("log: 3 messages are missing here"), "{lines:?}");
        log.finish(Duration::from_secs(10));
        assert!(log.0.lock().messages.is_empty());
    }

    #[test]
    fn long_text_waits_for_room_but_not_for_ever() {
        let (log, tell, see) = told();
        let text = "statistics\n".repeat(MESSAGES_MAX + 100);
        log.print_long(Level::INFO, &text, Duration::from_millis(50));
        assert!(log.0.lock().lost >= 99);
        drop(tell);
        log.print_long(Level::INFO, "last", Duration::from_secs(10));
        assert!(see.iter().any(|line| line == "last\n"));
    }
}
