//! The life of a client, from its arrival on a reactor to its end: one state, and one table of its
//! transitions, for all front doors. `client` moves along it, a protocol reads it.
//!
//! ```text
//!   Arriving ── Serve ──► Serving ── Finish ──► Quiescing(End) ── all is answered ──► dropped
//!                         ▲     │
//!                   Serve │     │ Queue
//!                         │     ▼
//!                         Queued
//!
//!   A hand-over, of a client that is Serving, Queued or Quiescing(End):
//!
//!   ── Suspend ──► Quiescing(Handover) ── Settle ──► Saved ── Leave ──► Gone
//!                           │ Resume                   │ Resume
//!                           ▼                          ▼
//!                  as it was before            as it was before
//!
//!   Lose, from any of them but Saved: Gone. Finish, before anything was begun: Gone.
//! ```
//!
//! [`Life::after`] is the table, and has what the drawing leaves out: what happens to a client during a
//! hand-over. The two states of a hand-over remember what the client was, so that it can go on if the
//! hand-over fails. A client that another daemon has saved begins as it was saved.

/// The state of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    /// The client is not on its reactor yet: nothing is taken from it or sent to it.
    Arriving,
    /// The client has selected a disk, and earlier sessions of that disk have to end before the
    /// answer: nothing is taken or sent.
    Queued,
    /// Requests are taken, and answered.
    Serving,
    /// No request is taken; those that were begun are finished, and answered.
    Quiescing(Reason),
    /// At rest, for a hand-over to or from another daemon: nothing is taken or sent.
    Saved(Resume),
    /// The client has left, or may stay no longer: nothing is sent to it. It is dropped when all
    /// that was begun has ended.
    Gone,
}

/// Why no request is taken any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// The client ends: it sends no more, or the disk or this daemon ends.
    End,
    /// Another daemon takes over.
    Handover(Resume),
}

/// What a client was before a hand-over, and continues as if that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Resume {
    Queued,
    Serving,
    Ending,
    Gone,
}

/// What happens to a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The client may be served: it has arrived, or earlier sessions have ended.
    Serve,
    /// The client has to wait for earlier sessions.
    Queue,
    /// The client sends no more, or no more is to be taken from it.
    Finish,
    /// The client is gone, or is to be.
    Lose,
    /// Another daemon is about to take over.
    Suspend,
    /// The client was saved, or restored.
    Settle,
    /// No daemon has taken over, or this one has.
    Resume,
    /// Another daemon serves the client.
    Leave,
}

impl Life {
    /// The state after an event. An event that a state has no use for leaves it as it is.
    #[must_use]
    pub(crate) fn after(self, event: Event) -> Self {
        use Event::{Finish, Leave, Lose, Queue, Settle, Suspend};
        use Life::{Arriving, Gone, Queued, Quiescing, Saved, Serving};
        use Reason::{End, Handover};
        match (self, event) {
            (_, Leave) => Gone,

            (Arriving, Event::Serve) => Serving,
            (Arriving, Finish | Lose) => Gone,

            (Queued, Event::Serve) => Serving,
            (Queued, Suspend) => Quiescing(Handover(Resume::Queued)),
            // Nothing was begun.
            (Queued, Finish | Lose) => Gone,

            (Serving, Queue) => Queued,
            (Serving, Suspend) => Quiescing(Handover(Resume::Serving)),
            (Serving, Finish) => Quiescing(End),
            (Serving, Lose) => Gone,

            (Quiescing(End), Suspend) => Quiescing(Handover(Resume::Ending)),
            (Quiescing(End), Lose) => Gone,

            (Quiescing(Handover(Resume::Queued)), Event::Serve) => Quiescing(Handover(Resume::Serving)),
            (Quiescing(Handover(Resume::Queued)), Finish) => Gone,
            (Quiescing(Handover(Resume::Serving)), Finish) => Quiescing(Handover(Resume::Ending)),
            (Quiescing(Handover(was)), Settle) => Saved(was),
            (Quiescing(Handover(was)), Event::Resume) => was.into(),
            (Quiescing(Handover(_)), Lose) => Gone,

            // At rest, the other daemon may have the client already: its end waits for what comes
            // of the hand-over.
            (Saved(Resume::Serving), Finish) => Saved(Resume::Ending),
            (Saved(Resume::Queued), Finish) | (Saved(_), Lose) => Saved(Resume::Gone),
            (Saved(Resume::Gone), Suspend) => Gone,
            (Saved(was), Suspend) => Quiescing(Handover(was)),
            (Saved(was), Event::Resume) => was.into(),

            (unchanged, _) => unchanged,
        }
    }

    /// Goes on with an event.
    #[inline]
    pub(crate) fn apply(&mut self, event: Event) {
        *self = self.after(event);
    }

    /// Returns whether replies are sent.
    #[inline]
    pub(crate) fn sends(self) -> bool {
        matches!(
            self,
            Self::Serving | Self::Quiescing(Reason::End | Reason::Handover(Resume::Serving | Resume::Ending))
        )
    }

    /// Returns whether the client stays unless something happens.
    #[inline]
    pub(crate) fn is_open(self) -> bool {
        match self {
            Self::Arriving | Self::Queued | Self::Serving => true,
            Self::Quiescing(Reason::Handover(was)) | Self::Saved(was) => {
                matches!(was, Resume::Queued | Resume::Serving)
            }
            Self::Quiescing(Reason::End) | Self::Gone => false,
        }
    }

    /// Returns whether the client ends now: not while it is at rest.
    #[inline]
    pub(crate) fn is_ending(self) -> bool {
        !self.is_open() && !self.is_at_rest()
    }

    /// Returns whether the client waits for what comes of a hand-over.
    #[inline]
    pub(crate) fn is_at_rest(self) -> bool {
        matches!(self, Self::Saved(_))
    }

    /// Returns whether the client is to be saved as soon as all that was begun has ended.
    #[inline]
    pub(crate) fn is_to_be_saved(self) -> bool {
        matches!(self, Self::Quiescing(Reason::Handover(_)))
    }

    /// Returns whether the client waits for earlier sessions, now or as soon as it is not handed
    /// over.
    #[inline]
    pub(crate) fn is_queued(self) -> bool {
        matches!(
            self,
            Self::Queued | Self::Quiescing(Reason::Handover(Resume::Queued)) | Self::Saved(Resume::Queued)
        )
    }
}

impl From<Resume> for Life {
    fn from(was: Resume) -> Self {
        match was {
            Resume::Queued => Self::Queued,
            Resume::Serving => Self::Serving,
            Resume::Ending => Self::Quiescing(Reason::End),
            Resume::Gone => Self::Gone,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENTS: [Event; 8] = [
        Event::Serve,
        Event::Queue,
        Event::Finish,
        Event::Lose,
        Event::Suspend,
        Event::Settle,
        Event::Resume,
        Event::Leave,
    ];

    /// All states that can be reached, in the order in which they are.
    fn reachable() -> Vec<Life> {
        let mut states = vec![Life::Arriving];
        for at in 0.. {
            let Some(&state) = states.get(at) else { break };
            for event in EVENTS {
                let next = state.after(event);
                if !states.contains(&next) {
                    states.push(next);
                }
            }
        }
        states
    }

    fn name(state: Life) -> String {
        format!("{state:?}")
            .replace("Quiescing(End)", "Ending")
            .replace("Quiescing(Handover(", "Handover(")
            .replace("))", ")")
    }

    /// The table as people read it: a state a line, and an event a column; `.` where nothing changes.
    fn table() -> String {
        let mut table = format!("{:17}", "");
        for event in EVENTS {
            table += &format!(" {:17}", format!("{event:?}"));
        }
        for state in reachable() {
            table = format!("{}\n{:17}", table.trim_end(), name(state));
            for event in EVENTS {
                let next = state.after(event);
                let next = if next == state { ".".to_owned() } else { name(next) };
                table += &format!(" {next:17}");
            }
        }
        table.trim_end().to_owned()
    }

    #[test]
    fn life_goes_along_its_table() {
        let table = table();
        println!("{table}");
        assert_eq!(table, TABLE.trim_matches('\n'));
    }

    const TABLE: &str = "
                  Serve             Queue             Finish            Lose              Suspend           Settle            Resume            Leave
Arriving          Serving           .                 Gone              Gone              .                 .                 .                 Gone
Serving           .                 Queued            Ending            Gone              Handover(Serving) .                 .                 Gone
Gone              .                 .                 .                 .                 .                 .                 .                 .
Queued            Serving           .                 Gone              Gone              Handover(Queued)  .                 .                 Gone
Ending            .                 .                 .                 Gone              Handover(Ending)  .                 .                 Gone
Handover(Serving) .                 .                 Handover(Ending)  Gone              .                 Saved(Serving)    Serving           Gone
Handover(Queued)  Handover(Serving) .                 Gone              Gone              .                 Saved(Queued)     Queued            Gone
Handover(Ending)  .                 .                 .                 Gone              .                 Saved(Ending)     Ending            Gone
Saved(Serving)    .                 .                 Saved(Ending)     Saved(Gone)       Handover(Serving) .                 Serving           Gone
Saved(Queued)     .                 .                 Saved(Gone)       Saved(Gone)       Handover(Queued)  .                 Queued            Gone
Saved(Ending)     .                 .                 .                 Saved(Gone)       Handover(Ending)  .                 Ending            Gone
Saved(Gone)       .                 .                 .                 .                 Gone              .                 Gone              Gone
";
}
