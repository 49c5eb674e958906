//! A guest's driver at the daemon's vhost-user socket: it writes, reads and compares until it is told to stop, and keeps
//! its one connection unless it is told that the daemon is another one.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use blkmq_testkit::vhost_user::{AVAIL, DATA, FrontEnd, USED};

/// A guest that runs.
pub(super) struct Guest {
    orders: Sender<Order>,
    thread: JoinHandle<Result<u64>>,
}

enum Order {
    ConnectAgain,
    Stop,
}

/// What the guest's thread has.
struct Driver {
    socket: PathBuf,
    front_end: FrontEnd,
    orders: Receiver<Order>,
    /// How many requests it has ever made available.
    offered: u16,
    is_over: bool,
}

impl Guest {
    pub(super) fn start(socket: &Path) -> Self {
        let ((orders, received), socket) = (channel(), socket.to_owned());
        let run = move || {
            let front_end = FrontEnd::connect(&socket);
            front_end.start();
            let driver = Driver {
                socket,
                front_end,
                orders: received,
                offered: 0,
                is_over: false,
            };
            driver.run()
        };
        Self {
            orders,
            thread: thread::spawn(run),
        }
    }

    /// Has it connect to a daemon that was started again.
    pub(super) fn connect_again(&self) -> Result<()> {
        self.orders
            .send(Order::ConnectAgain)
            .map_err(|_| anyhow!("the guest has ended before"))
    }

    /// Ends it. Returns how many sectors it has written and found again.
    pub(super) fn stop(self) -> Result<u64> {
        // One that has ended before says why.
        let _ = self.orders.send(Order::Stop);
        let ended = self.thread.join();
        ended.map_err(|_| anyhow!("the guest has lost its connection"))?
    }
}

impl Driver {
    fn run(mut self) -> Result<u64> {
        let mut verified = 0;
        for round in 0_u64.. {
            self.look_at_orders();
            if self.is_over {
                break;
            }
            let first = FIRST_SECTOR + round * HEADS.len() as u64 % SECTORS;
            let data = |head: u16| [(round as u8).wrapping_mul(7).wrapping_add(head as u8); 512];
            for kind in [WRITE, READ] {
                for (sector, head) in (first..).zip(HEADS) {
                    self.front_end.request(head, kind, sector);
                    let content = if kind == WRITE { data(head) } else { [0; 512] };
                    self.front_end.write(place(head), &content);
                }
                self.offer();
                self.wait()?;
                for head in HEADS {
                    let status = self.front_end.status(head);
                    ensure!(status == 0, "round {round}: a request ended with status {status}");
                    let found: [u8; 512] = self.front_end.read(place(head));
                    ensure!(found == data(head), "round {round}: other data were read");
                }
            }
            verified += HEADS.len() as u64;
            thread::sleep(PAUSE);
        }
        Ok(verified)
    }

    /// Makes a request at each head available.
    fn offer(&mut self) {
        for head in HEADS {
            let place = AVAIL + 4 + 2 * u64::from(self.offered % RING);
            self.front_end.write(place, &head.to_le_bytes());
            self.offered = self.offered.wrapping_add(1);
        }
        self.front_end.write(AVAIL + 2, &self.offered.to_le_bytes());
        self.front_end.kick();
    }

    /// Waits until all requests have come back.
    fn wait(&mut self) -> Result<()> {
        let start = Instant::now();
        while self.used() != self.offered {
            self.look_at_orders();
            ensure!(start.elapsed() < ANSWER_MAX, "requests do not come back");
            thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// How many requests have ever come back.
    fn used(&self) -> u16 {
        u16::from_le_bytes(self.front_end.read(USED + 2))
    }

    fn look_at_orders(&mut self) {
        match self.orders.try_recv() {
            Ok(Order::ConnectAgain) => {
                self.front_end.connect_again(&self.socket);
                // What has not come back is done again.
                self.front_end.start_at(self.used().into());
                self.front_end.kick();
            }
            Ok(Order::Stop) | Err(TryRecvError::Disconnected) => self.is_over = true,
            Err(TryRecvError::Empty) => {}
        }
    }
}

/// Where the data of the request with this head are.
fn place(head: u16) -> u64 {
    DATA + 4096 * u64::from(head) + 512
}

/// The first of three descriptors each.
const HEADS: [u16; 5] = [0, 3, 6, 9, 12];
const RING: u16 = 16;
const READ: u32 = 0;
const WRITE: u32 = 1;
/// Behind what fio writes.
const FIRST_SECTOR: u64 = (32 << 20) / 512;
const SECTORS: u64 = 8192;
/// Between rounds: the processors are for others, too.
const PAUSE: Duration = Duration::from_millis(1);
/// As long as a daemon takes to be started again.
const ANSWER_MAX: Duration = Duration::from_secs(60);
