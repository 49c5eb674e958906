//! A debugger that stops one thread of a process while its other threads go on, as a thread that hangs; SIGSTOP would
//! stop all of them.

mod sys;

use std::fs;
use std::io;
use std::marker::PhantomData;

use anyhow::{Context, Result};
use rustix::process::{Pid, WaitOptions, waitpid};

/// A thread that is stopped; it goes on when this is dropped, or when the thread that has stopped it ends.
#[derive(Debug)]
pub struct Stopped {
    thread: Pid,
    /// The kernel obeys the thread alone that has stopped it.
    of_this_thread: PhantomData<*const ()>,
}

impl Stopped {
    /// Stops the thread of a process that has this name, and returns when it has stopped.
    ///
    /// # Errors
    /// There is no such thread, or this user may not debug the process.
    pub fn thread(process: u32, name: &str) -> Result<Self> {
        let thread = find(process, name).with_context(|| format!("process {process}, thread {name}"))?;
        sys::seize(thread).context("PTRACE_SEIZE")?;
        let stopped = Self {
            thread,
            of_this_thread: PhantomData,
        };
        sys::interrupt(thread).context("PTRACE_INTERRUPT")?;
        waitpid(Some(thread), WaitOptions::UNTRACED).context("waiting until it has stopped")?;
        Ok(stopped)
    }

    /// Returns whether the thread has ended, as with a process that was killed. The process is a zombie until its
    /// debugger has asked.
    pub fn has_ended(&self) -> bool {
        match waitpid(Some(self.thread), WaitOptions::NOHANG) {
            Ok(Some((_, status))) => status.exited() || status.signaled(),
            Ok(None) => false,
            Err(_) => true,
        }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It fails if the thread has ended.
        let _ = sys::detach(self.thread);
    }
}

fn find(process: u32, name: &str) -> io::Result<Pid> {
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        let task = task?;
        if fs::read_to_string(task.path().join("comm"))?.trim_end() == name {
            let number = task.file_name().to_string_lossy().parse().ok();
            return number
                .and_then(Pid::from_raw)
                .ok_or(io::ErrorKind::InvalidData.into());
        }
    }
    Err(io::ErrorKind::NotFound.into())
}
