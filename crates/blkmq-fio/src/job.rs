//! One job's I/O through the engine: staged when fio queues it, issued when fio commits, returned when
//! fio asks for events. `sys` calls it with what it has read from fio's structures; `shared_engine` has
//! the engine.

use std::ops::Range;

use blkmq_core::bio::{Bio, Class, Data, Op, Prio};
use blkmq_core::time::Nanos;

use crate::shared_engine::JobHandle;

/// One I/O of fio.
pub(crate) struct Io {
    pub(crate) op: Op,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) data: Data,
    /// In the form of `ioprio_set(2)`: the class from bit 13 on, the level below.
    pub(crate) ioprio: u16,
    /// Returned with the completion.
    pub(crate) cookie: u64,
}

/// One job, on its thread.
pub(crate) struct Job {
    /// The common fields of bios.
    pattern: Bio,
    handle: JobHandle,
    /// Completed bios. fio may ask for one at a time, so the list is only emptied when fio has
    /// asked for all.
    ended: Vec<Bio>,
    /// The bios reported to fio last; those before them have been returned.
    reaped: Range<usize>,
}

impl Job {
    pub(crate) fn new(handle: JobHandle) -> Self {
        Self {
            pattern: Bio {
                disk: handle.disk.id,
                group: handle.group,
                ..Bio::default()
            },
            handle,
            ended: Vec::with_capacity(ENDED_AT_ONCE),
            reaped: 0..0,
        }
    }

    /// Stages an I/O. Returns false if there is no room until something ends.
    #[inline]
    pub(crate) fn queue(&mut self, io: Io) -> bool {
        let is_flush = io.op == Op::Flush;
        let bio = Bio {
            op: io.op,
            offset: if is_flush { 0 } else { io.offset },
            len: if is_flush { 0 } else { io.len },
            data: io.data,
            prio: prio(io.ioprio),
            cookie: io.cookie,
            ..self.pattern.clone()
        };
        self.handle.attached.submit(self.handle.disk.queue, bio).is_ok()
    }

    /// Issues the staged I/O.
    #[inline]
    pub(crate) fn commit(&mut self) {
        self.handle.attached.unplug();
    }

    /// Waits until `min` have completed or `timeout` is over, and returns how many of at most `max`
    /// have.
    #[inline]
    pub(crate) fn wait(&mut self, min: usize, max: usize, timeout: Option<Nanos>) -> usize {
        if self.reaped.end == self.ended.len() {
            self.ended.clear();
            self.reaped.end = 0;
        }
        let from = self.reaped.end;
        let attached = &mut self.handle.attached;
        if self.ended.len() - from < min.max(1) {
            attached.poll(&mut self.ended);
        }
        if self.ended.len() - from < min {
            let until = timeout.map(|timeout| attached.now() + timeout);
            while self.ended.len() - from < min && attached.outstanding() > 0 {
                let left = until.map(|until| until.since(attached.now()));
                if left == Some(Nanos(0)) {
                    break;
                }
                attached.wait(&mut self.ended, left);
            }
        }
        self.reaped = from..self.ended.len().min(from + max);
        self.reaped.len()
    }

    /// One of the bios that [`Job::wait`] counted: its cookie, and its errno.
    #[inline]
    pub(crate) fn event(&self, index: usize) -> Option<(u64, i32)> {
        let bio = self.ended[self.reaped.clone()].get(index)?;
        Some((bio.cookie, bio.status.errno()))
    }

    /// Ends the job, and returns the handle.
    pub(crate) fn into_ticket(self) -> JobHandle {
        self.handle
    }
}

/// Decodes a priority of `ioprio_set(2)`. Class 0, none given, is best effort with the middle
/// level.
fn prio(ioprio: u16) -> Prio {
    let class = match ioprio >> 13 {
        1 => Class::Rt,
        2 => Class::Be,
        3 => Class::Idle,
        _ => return Prio::default(),
    };
    Prio {
        class,
        level: (ioprio & 7) as u8,
    }
}

const ENDED_AT_ONCE: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared_engine::{JobOptions, SharedEngine};

    #[test]
    fn queued_units_end_once_and_are_reported_in_portions() {
        let shared_engine = SharedEngine::new();
        let options = JobOptions {
            disk: "ram=1M,name=job".to_owned(),
            ..JobOptions::default()
        };
        shared_engine.register(77, options).unwrap();
        let mut job = Job::new(shared_engine.enter(77).unwrap());
        for cookie in 0..10 {
            let is_queued = job.queue(Io {
                op: if cookie == 9 { Op::Flush } else { Op::WriteZeroes },
                offset: cookie * 4096,
                len: 4096,
                data: Data::None,
                ioprio: 0,
                cookie,
            });
            assert!(is_queued);
        }
        job.commit();
        let mut cookies = Vec::new();
        while cookies.len() < 10 {
            let count = job.wait(1, 4, None);
            assert!((1..=4).contains(&count), "{count}");
            assert_eq!(job.event(count), None);
            cookies.extend((0..count).filter_map(|index| job.event(index)));
        }
        cookies.sort_unstable();
        assert_eq!(cookies, (0..10).map(|cookie| (cookie, 0)).collect::<Vec<_>>());
        assert_eq!(job.wait(0, 4, None), 0);
        shared_engine.leave(77, job.into_ticket());
    }

    #[test]
    fn priorities_are_as_the_system_call_has_them() {
        assert_eq!(prio(0), Prio::default());
        assert_eq!(
            prio(1 << 13 | 3),
            Prio {
                class: Class::Rt,
                level: 3
            }
        );
        assert_eq!(prio(3 << 13).class, Class::Idle);
    }
}
