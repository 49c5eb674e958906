//! Disks whose images are changed for a short time while nobody has the lock of changes: until then the image stays, and
//! nobody takes over.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Result, ensure};

/// How many such changes are under way, by disk.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    counts: Mutex<BTreeMap<String, usize>>,
    left: Condvar,
}

/// One of them, until it is dropped.
#[derive(Debug)]
pub(in crate::serve::running) struct Claim<'a> {
    claims: &'a Claims,
    disk: String,
}

impl Claims {
    /// Claims a disk, beside others.
    pub(in crate::serve::running) fn claim(&self, disk: &str) -> Claim<'_> {
        *self.lock().entry(disk.to_owned()).or_default() += 1;
        Claim {
            claims: self,
            disk: disk.to_owned(),
        }
    }

    /// Checks that a disk is not claimed.
    ///
    /// # Errors
    /// It is.
    pub(in crate::serve::running) fn check_free(&self, disk: &str) -> Result<()> {
        ensure!(
            !self.lock().contains_key(disk),
            "disk {disk}: its bitmaps are being changed: try again when that has ended"
        );
        Ok(())
    }

    /// Waits until a disk is not claimed, or without a name all are. Returns whether they are, within `limit`.
    pub(in crate::serve::running) fn wait(&self, disk: Option<&str>, limit: Duration) -> bool {
        let is_claimed = |counts: &mut BTreeMap<String, usize>| match disk {
            Some(disk) => counts.contains_key(disk),
            None => !counts.is_empty(),
        };
        let waited = self.left.wait_timeout_while(self.lock(), limit, is_claimed);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let mut counts = self.claims.lock();
        match counts.get_mut(&self.disk) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(counts.remove(&self.disk)),
        }
        self.claims.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_is_free_when_the_last_claim_of_it_is_dropped() {
        let claims = Claims::default();
        let (one, two) = (claims.claim("vm1"), claims.claim("vm1"));
        claims.check_free("vm2").unwrap();
        assert!(claims.wait(Some("vm2"), Duration::ZERO) && !claims.wait(None, Duration::ZERO));
        drop(one);
        let refused = claims.check_free("vm1").unwrap_err().to_string();
        assert!(refused.contains("disk vm1: its bitmaps"), "{refused}");
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(claims.wait(Some("vm1"), Duration::from_secs(60))));
            drop(two);
        });
        claims.check_free("vm1").unwrap();
        assert!(claims.wait(None, Duration::ZERO));
    }
}
