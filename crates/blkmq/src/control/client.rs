//! Decides how a daemon is asked over its control socket: one request after the other, with a time limit.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::statistics::Statistics;

/// A connection to a daemon.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    next: u64,
}

impl Client {
    /// Connects to a daemon's control socket.
    ///
    /// # Errors
    /// If nobody listens there, or whoever asks may not connect.
    pub fn connect(path: &Path) -> Result<Self> {
        Self::connect_within(path, ANSWER_MAX)
    }

    /// The same, with a limit of one's own for each answer.
    ///
    /// # Errors
    /// As for [`Client::connect`].
    pub fn connect_within(path: &Path, answer_max: Duration) -> Result<Self> {
        let stream = UnixStream::connect(path).with_context(|| {
            format!("no daemon can be asked at {}: is one running, with this control socket (--control), and may you use it?", path.display())
        })?;
        stream.set_read_timeout(Some(answer_max))?;
        stream.set_write_timeout(Some(answer_max))?;
        Ok(Self {
            stream: BufReader::with_capacity(READ_BYTES, stream),
            next: 0,
        })
    }

    /// Calls a method. Returns its result.
    ///
    /// # Errors
    /// What the daemon says, or that it has gone.
    pub fn call(&mut self, method: &str, params: &Value) -> Result<Value> {
        self.next += 1;
        let request = json!({"jsonrpc": "2.0", "id": self.next, "method": method, "params": params});
        let line = format!("{request}\n");
        let sent = self.stream.get_mut().write_all(line.as_bytes());
        loop {
            // Who is turned away is told why before it has said anything.
            let mut answer = match (&sent, self.next_line()) {
                (_, Ok(answer)) => answer,
                (Err(error), Err(_)) => {
                    bail!("the daemon has hung up, as it does when it has too many clients: {error}")
                }
                (Ok(()), Err(error)) => return Err(error),
            };
            let id = answer.get("id");
            let error = answer.pointer("/error/message").and_then(Value::as_str);
            match error {
                Some(message) if id == Some(&self.next.into()) || id == Some(&Value::Null) => {
                    bail!("{message}")
                }
                // Something that was subscribed to.
                _ if id != Some(&self.next.into()) => {}
                _ => return Ok(answer["result"].take()),
            }
        }
    }

    /// Gives up asking: what the connection carries from now on is no lines. A read of it waits for at most `wait`.
    ///
    /// # Errors
    /// If the time cannot be set.
    pub fn into_stream(self, wait: Duration) -> Result<impl Read> {
        self.stream.get_ref().set_read_timeout(Some(wait))?;
        Ok(self.stream)
    }

    /// Has the daemon send its statistics at once and after each interval.
    ///
    /// # Errors
    /// If the interval is too short or too long for the daemon, or it has gone.
    pub fn subscribe(&mut self, interval: Duration) -> Result<()> {
        self.call("subscribe", &json!({"interval_ms": interval.as_millis() as u64}))?;
        let patience = Some(interval + ANSWER_MAX);
        Ok(self.stream.get_ref().set_read_timeout(patience)?)
    }

    /// Waits for the next statistics, after [`Self::subscribe`].
    ///
    /// # Errors
    /// If the daemon has gone, or sends something else.
    pub fn next_statistics(&mut self) -> Result<Statistics> {
        #[derive(Deserialize)]
        struct Notification {
            params: Statistics,
        }
        let line = self.read_line()?;
        let read = serde_json::from_str::<Notification>(&line);
        Ok(read
            .context("the daemon sends no statistics that are understood")?
            .params)
    }

    /// Waits for the next line that the daemon sends.
    ///
    /// # Errors
    /// If it has gone, or sends no JSON.
    pub fn next_line(&mut self) -> Result<Value> {
        Ok(serde_json::from_str(&self.read_line()?)?)
    }

    fn read_line(&mut self) -> Result<String> {
        let mut line = String::new();
        let len = self
            .stream
            .read_line(&mut line)
            .context("the daemon does not answer")?;
        if len == 0 {
            bail!("the daemon has closed the connection");
        }
        Ok(line)
    }
}

/// Statistics of many groups are some hundreds of KiB.
const READ_BYTES: usize = 256 << 10;
/// Longer than a change may take that waits for requests under way.
const ANSWER_MAX: Duration = Duration::from_secs(120);
