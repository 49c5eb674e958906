//! The keys of encrypted disks in this process: what keeps them from cores and debuggers.

use anyhow::{Context, Result};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

/// Has the kernel write no core of this process, and permit no other process of its user to read its memory.
///
/// # Errors
/// The system refuses.
pub(super) fn leave_no_core() -> Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("cores of this process cannot be prevented")
}
