//! The elevators: their names, and a constructor that makes one with room for all requests of its queue.
//! A new elevator needs its module, its lines here, and a page in `docs/schedulers`; `registry` has the list, to
//! which users of the crate add theirs.

pub mod bfq;
mod depth;
mod elevator;
mod index;
pub mod kyber;
pub mod mq_deadline;
mod none;
pub(crate) mod overdue;
mod registry;
mod request_list;
mod slots;

pub use bfq::BFQ;
pub use elevator::{Elevator, GroupAware, InsertAt, Inserted, Note, TunableError};
pub use kyber::KYBER;
pub use mq_deadline::MQ_DEADLINE;
pub use none::NONE;
pub use registry::{Build, ElevatorType, Registry, Setup, UnknownElevator};

/// The elevators of this crate, in the order in which messages list them.
pub const BUILT_IN: [&ElevatorType; 4] = [NONE, MQ_DEADLINE, KYBER, BFQ];

/// The elevator that a queue gets if groups have weights and nobody has chosen one.
pub const FOR_WEIGHTS: &ElevatorType = BFQ;
