//! The sides on tokio: as many tasks as reads under way, which are counted. With the library's futures, and with
//! tokio's own files.

use std::io::SeekFrom;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use blkmq_engine::{Buffer, Engine};
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt};
use tokio::runtime::Runtime;

use super::{BLOCK, Side};
use crate::offsets::Offsets;

/// Tasks that read until they are told to stop.
struct Tasks {
    runtime: Option<Runtime>,
    shared: Arc<Shared>,
    seen: u64,
}

/// All counts are of reads alone and order nothing else, so they are relaxed.
#[derive(Default)]
struct Shared {
    count: AtomicU64,
    has_failed: AtomicBool,
    is_over: AtomicBool,
}

impl Tasks {
    fn new() -> Result<Self> {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        Ok(Self {
            runtime: Some(builder.worker_threads(2).build()?),
            shared: Arc::default(),
            seen: 0,
        })
    }

    /// Starts a task that reads again and again.
    fn spawn<F>(&self, mut read: impl FnMut() -> F + Send + 'static)
    where
        F: Future<Output = std::io::Result<()>> + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        let task = async move {
            while !shared.is_over.load(Ordering::Relaxed) {
                match read().await {
                    Ok(()) => shared.count.fetch_add(1, Ordering::Relaxed),
                    Err(_) => return shared.has_failed.store(true, Ordering::Relaxed),
                };
            }
        };
        self.runtime.as_ref().expect("there until dropped").spawn(task);
    }

    /// Sleeps for a moment, and counts what has ended.
    fn batch(&mut self) -> Result<u64> {
        std::thread::sleep(Duration::from_micros(100));
        ensure!(
            !self.shared.has_failed.load(Ordering::Relaxed),
            "a read has failed"
        );
        let count = self.shared.count.load(Ordering::Relaxed);
        Ok(count - std::mem::replace(&mut self.seen, count))
    }
}

impl Drop for Tasks {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(10));
        }
    }
}

/// The library's futures.
pub(super) struct Futures {
    tasks: Tasks,
    _engine: Engine,
}

impl Futures {
    pub(super) fn open(disk: &str, depth: usize) -> Result<Box<dyn Side>> {
        let engine = Engine::builder().disk(disk).start()?;
        let tasks = Tasks::new()?;
        let disk = engine.disk("d")?;
        for seed in 0..depth {
            let mut offsets = Offsets::new(disk.size(), BLOCK as u64, true, seed as u64);
            let disk = disk.clone();
            let free = Arc::new(std::sync::Mutex::new(Buffer::new(BLOCK)));
            tasks.spawn(move || {
                let buffer = std::mem::take(&mut *free.lock().expect("no panic"));
                let read = disk.read(offsets.next(), buffer);
                let free = Arc::clone(&free);
                async move {
                    *free.lock().expect("no panic") = read.await?;
                    Ok(())
                }
            });
        }
        Ok(Box::new(Self {
            tasks,
            _engine: engine,
        }))
    }
}

impl Side for Futures {
    fn batch(&mut self) -> Result<u64> {
        self.tasks.batch()
    }
}

/// tokio's own files: one for each task.
pub(super) struct Tokio(Tasks);

impl Tokio {
    pub(super) fn open(path: &Path, depth: usize) -> Result<Box<dyn Side>> {
        let tasks = Tasks::new()?;
        let size = std::fs::metadata(path)?.len();
        for seed in 0..depth {
            let mut offsets = Offsets::new(size, BLOCK as u64, true, seed as u64);
            let file = File::from_std(std::fs::File::open(path)?);
            let file = Arc::new(tokio::sync::Mutex::new((file, vec![0; BLOCK])));
            tasks.spawn(move || {
                let (file, offset) = (Arc::clone(&file), offsets.next());
                async move {
                    let (file, buffer) = &mut *file.lock().await;
                    file.seek(SeekFrom::Start(offset)).await?;
                    file.read_exact(buffer).await.map(drop)
                }
            });
        }
        Ok(Box::new(Self(tasks)))
    }
}

impl Side for Tokio {
    fn batch(&mut self) -> Result<u64> {
        self.0.batch()
    }
}
