//! What the tests of images stand on: a directory, QEMU's tools, and an image that is served.

use std::path::{Path, PathBuf};
use std::process::Command;

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::driver::{HctxDriver, Issued};
use blkmq_core::ids::{DiskId, HctxId};
use blkmq_core::request::Request;
use blkmq_core::time::Instant;
use blkmq_host::device::{Device, Replacement};
use blkmq_host::ring::{RingConfig, RingHandle};

use super::super::*;
use super::DEPTH;
use crate::file::FileDevice;
use crate::mapping::Mapping;
use crate::testing::{cookie, lend, request, request_with};

/// A directory of a test's own.
pub(super) struct Scratch(pub(super) PathBuf);

impl Scratch {
    pub(super) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("blkmq-qcow2-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs a tool of QEMU in a directory. Returns what it wrote; `None`, aloud, if it is not installed.
pub(super) fn qemu(scratch: &Scratch, tool: &str, words: &str) -> Option<String> {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let mut command = Command::new(tool);
        let output = command
            .args(words.split_whitespace())
            .current_dir(&scratch.0)
            .output();
        let Ok(output) = output else {
            blkmq_testkit::skip("qemu-img is not installed");
            return None;
        };
        let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        // The kernel may need a moment to dismantle a ring, which has the file until then.
        if text.contains("Failed to lock") && std::time::Instant::now() < end {
            std::thread::sleep(std::time::Duration::from_millis(20));
            continue;
        }
        assert!(output.status.success(), "{tool} {words}: {text}");
        return Some(text);
    }
}

/// Makes an image by `qemu-img create`; not, aloud, if that is not installed.
pub(super) fn created(scratch: &Scratch, words: &str) -> bool {
    qemu(scratch, "qemu-img", &format!("create -q -f qcow2 {words}")).is_some()
}

/// An image that is served.
pub(super) struct Rig {
    pub(super) hctx: ImageHctx,
    pub(super) device: FileDevice,
    pub(super) ring: RingHandle,
}

impl Rig {
    pub(super) fn open(config: &Qcow2Config) -> Self {
        Self::of(ImageDisk::open(config).unwrap_or_else(|error| panic!("{error}")))
    }

    pub(super) fn of(disk: ImageDisk) -> Self {
        let device = crate::driver::OpenDisk::join(Box::new(disk), "test", Vec::new(), &[0], DEPTH).unwrap();
        let device: std::sync::Arc<dyn std::any::Any + Send + Sync> = device;
        let device = device.downcast::<FileDevice>().unwrap();
        let ring = RingHandle::new(RingConfig::default()).expect("io_uring is available");
        let hctx = device.image_hctx(&ring, HctxId(0)).unwrap();
        Self {
            hctx,
            device: (*device).clone(),
            ring,
        }
    }

    pub(super) fn at(path: &Path) -> Self {
        Self::open(&config(path))
    }

    /// Carries out requests at once, and returns how they ended.
    pub(super) fn run_all(&mut self, requests: &[Box<Request>]) -> Vec<Status> {
        let mut status = vec![None; requests.len()];
        let mut done = Vec::new();
        for (tag, rq) in (0..).zip(requests) {
            loop {
                match self.hctx.issue(rq, cookie(tag), true, Instant(0)) {
                    Issued::Done(now) => status[tag as usize] = Some(now),
                    Issued::Queued => {}
                    Issued::Resource | Issued::DeviceResource => {
                        self.reap(&mut done);
                        continue;
                    }
                }
                break;
            }
        }
        loop {
            self.reap(&mut done);
            for end in done.drain(..) {
                status[end.cookie.tag().index()] = Some(end.status);
            }
            if status.iter().all(Option::is_some) {
                return status.into_iter().flatten().collect();
            }
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    }

    /// Replaces what the disk is made of, which its context refuses once, when it has done it.
    pub(super) fn refuse_to_replace(&mut self, replacement: Replacement) {
        let mut refuses = true;
        let hctx = std::cell::RefCell::new((&mut self.hctx, &mut refuses));
        let refresh = || {
            let (hctx, refuses) = &mut *hctx.borrow_mut();
            hctx.refresh_disks().map_err(std::io::Error::other)?;
            match std::mem::take(*refuses) {
                true => Err(std::io::Error::other("no")),
                false => Ok(()),
            }
        };
        let error = self.device.replace(&[(DiskId(0), replacement)], &refresh);
        assert_eq!(error.unwrap_err().to_string(), "no");
    }

    pub(super) fn reap(&mut self, done: &mut Vec<blkmq_core::driver::Done>) {
        self.ring.submit();
        self.ring.reap();
        self.hctx.reap(Instant(0), done);
    }

    pub(super) fn run(&mut self, rq: Box<Request>) -> Status {
        self.run_all(&[rq])[0]
    }

    pub(super) fn flush(&mut self) {
        assert_eq!(self.run(request(Op::Flush, 0, 0)), Status::Ok, "flush");
    }

    pub(super) fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let mut memory = Mapping::new(len).unwrap();
        let rq = request_with(Op::Read, Flags::NONE, 0, offset, &[lend(memory.bytes_mut())]);
        assert_eq!(self.run(rq), Status::Ok, "read of {len} at {offset}");
        memory.bytes_mut().to_vec()
    }

    pub(super) fn write(&mut self, flags: Flags, offset: u64, data: &[u8]) -> Status {
        let mut memory = Mapping::new(data.len()).unwrap();
        memory.bytes_mut().copy_from_slice(data);
        self.run(request_with(
            Op::Write,
            flags,
            0,
            offset,
            &[lend(memory.bytes_mut())],
        ))
    }
}

pub(super) fn config(path: &Path) -> Qcow2Config {
    Qcow2Config {
        path: path.to_owned(),
        ..Qcow2Config::default()
    }
}
