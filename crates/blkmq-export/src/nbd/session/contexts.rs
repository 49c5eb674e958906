//! The metadata contexts that a client finds and selects during `negotiation`: `base:allocation`, and one for each
//! bitmap of the export's disk. What was selected says which chunks the reply to a block status has.

use std::sync::Arc;

use blkmq_nbd::codec::handshake::MetaRequest;
use blkmq_nbd::codec::option_reply::{OptionReplies, ReplyKind};
use blkmq_nbd::codec::{ExtentState, HeaderStyle};

use super::negotiation::Negotiation;
use crate::nbd::export::Export;

/// The contexts that a client has selected for an export.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contexts {
    /// What is allocated.
    pub allocation: bool,
    /// What has changed, as these bitmaps say.
    pub bitmaps: Vec<String>,
}

impl Contexts {
    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        !self.allocation && self.bitmaps.is_empty()
    }

    /// Selects what a query names exactly, if the export has it and it is not selected yet.
    fn select(&mut self, query: &str, export: &Export, bitmaps: &[String]) {
        let bitmap = query.strip_prefix(BITMAP_CONTEXT);
        let bitmap = bitmap.and_then(|name| bitmaps.iter().find(|bitmap| *bitmap == name));
        match bitmap {
            Some(name) if self.bitmaps.len() < BITMAPS_MAX && !self.bitmaps.contains(name) => {
                self.bitmaps.push(name.clone());
            }
            Some(_) => {}
            None => self.allocation |= query == ALLOCATION_CONTEXT && export.features.block_status,
        }
    }
}

impl Negotiation {
    pub(super) fn answer_list_contexts(&self, data: &[u8], replies: &mut OptionReplies<'_>) {
        let Some((request, export)) = self.parse_contexts(data, replies) else {
            return;
        };
        let is_asked = |context: &str| {
            let mut queries = request.queries();
            request.query_count == 0 || queries.any(|query| query == context || is_namespace(query, context))
        };
        if export.features.block_status && is_asked(ALLOCATION_CONTEXT) {
            replies.meta_context(0, ALLOCATION_CONTEXT);
        }
        for name in export.bitmaps.names() {
            let context = format!("{BITMAP_CONTEXT}{name}");
            if is_asked(&context) {
                replies.meta_context(0, &context);
            }
        }
        replies.ack();
    }

    pub(super) fn answer_set_contexts(&mut self, data: &[u8], replies: &mut OptionReplies<'_>) {
        self.context = None;
        let Some((request, export)) = self.parse_contexts(data, replies) else {
            return;
        };
        let (mut contexts, bitmaps) = (Contexts::default(), export.bitmaps.names());
        for query in request.queries() {
            contexts.select(query, export, &bitmaps);
        }
        let id = export.id;
        if contexts.allocation {
            replies.meta_context(ALLOCATION_CONTEXT_ID, ALLOCATION_CONTEXT);
        }
        for (id, name) in (FIRST_BITMAP_ID..).zip(&contexts.bitmaps) {
            replies.meta_context(id, &format!("{BITMAP_CONTEXT}{name}"));
        }
        if !contexts.is_empty() {
            self.context = Some((id, contexts));
        }
        replies.ack();
    }

    fn parse_contexts<'a>(
        &self,
        data: &'a [u8],
        replies: &mut OptionReplies<'_>,
    ) -> Option<(MetaRequest<'a>, &Arc<Export>)> {
        if self.style == HeaderStyle::Simple {
            replies.error(
                ReplyKind::ERR_INVALID,
                "metadata needs STRUCTURED_REPLY or EXTENDED_HEADERS first",
            );
            return None;
        }
        let Some(request) = MetaRequest::parse(data) else {
            replies.error(
                ReplyKind::ERR_INVALID,
                "malformed option: name and queries do not fill its data",
            );
            return None;
        };
        Some((request, self.find(request.name, replies)?))
    }
}

/// Returns whether a query is for all contexts that begin like it.
fn is_namespace(query: &str, context: &str) -> bool {
    ["base:", "qemu:", BITMAP_CONTEXT].contains(&query) && context.starts_with(query)
}

const ALLOCATION_CONTEXT: &str = "base:allocation";
/// What the names of bitmaps follow, as QEMU has it.
const BITMAP_CONTEXT: &str = "qemu:dirty-bitmap:";
/// Their ids on the wire; those of bitmaps in the order in which they were selected.
pub(super) const ALLOCATION_CONTEXT_ID: u32 = 1;
pub(super) const FIRST_BITMAP_ID: u32 = 2;
/// The state of a run that has changed, in the context of a bitmap.
pub(in crate::nbd) const CHANGED: ExtentState = ExtentState(1);
/// Most bitmaps that a client selects: more are left out.
const BITMAPS_MAX: usize = 16;
