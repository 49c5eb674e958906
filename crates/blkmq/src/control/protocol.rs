//! The form of a line: a JSON-RPC 2.0 request, and its response. Batches are refused; a request without an id
//! is executed, and gets no response.

use serde::Serialize;
use serde_json::{Value, json};

use super::wiped::Wiped;

/// A request as it came.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) method: String,
    pub(super) params: Wiped,
    /// Absent where no response is wanted, which is something else than null.
    pub(super) id: Option<Value>,
}

/// Why a request was not executed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Failure {
    pub(super) code: i32,
    pub(super) message: String,
}

impl Failure {
    pub(super) fn new(code: i32, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { code, message }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::new(REFUSED, format!("{error:#}"))
    }
}

/// Parses a line, of which nothing is left in other memory than the request's. Changes its bytes.
///
/// # Errors
/// Why it is no request, and the id for the response, as far as there is one.
pub(super) fn parse(line: &mut [u8]) -> Result<Request, (Failure, Value)> {
    let mut whole = Wiped::parse(line)
        .map_err(|error| (Failure::new(NO_JSON, format!("no JSON: {error}")), Value::Null))?;
    let refuse =
        |what: &str, id: Option<Value>| Err((Failure::new(NO_REQUEST, what), id.unwrap_or_default()));
    if !whole.get().is_object() {
        return refuse(
            "no request of JSON-RPC 2.0, one an object and a line; there are no batches",
            None,
        );
    }
    let id = whole.remove("id").map(Wiped::take);
    let is_id = matches!(id, None | Some(Value::Null | Value::Number(_) | Value::String(_)));
    if whole.get()["jsonrpc"] != "2.0" || !is_id {
        return refuse(
            "\"jsonrpc\" must be \"2.0\", and \"id\" a number, a text or null",
            None,
        );
    }
    let Some(method) = whole.get()["method"].as_str().map(str::to_owned) else {
        return refuse("no request of JSON-RPC 2.0: \"method\" must be a text", id);
    };
    let params = whole.remove("params").unwrap_or_default();
    Ok(Request { method, params, id })
}

/// Writes the response to a request.
pub(super) fn answer(id: &Value, done: Result<Value, Failure>) -> String {
    let mut line = match done {
        Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
        Err(failure) => json!({"jsonrpc": "2.0", "id": id, "error": failure}),
    }
    .to_string();
    line.push('\n');
    line
}

/// Writes a notification, for a client that has subscribed to it.
///
/// # Errors
/// It cannot be written as JSON.
pub(super) fn notification(method: &str, params: &impl Serialize) -> serde_json::Result<String> {
    // Serialized directly, not as a tree of values first: it may be large, and is written
    // repeatedly.
    let notification = Notification {
        jsonrpc: "2.0",
        method,
        params,
    };
    let mut line = serde_json::to_string(&notification)?;
    line.push('\n');
    Ok(line)
}

#[derive(Serialize)]
struct Notification<'a, T> {
    jsonrpc: &'a str,
    method: &'a str,
    params: &'a T,
}

/// The line is no JSON.
pub(super) const NO_JSON: i32 = -32700;
/// It is no request.
pub(super) const NO_REQUEST: i32 = -32600;
/// There is no such method.
pub(super) const NO_METHOD: i32 = -32601;
/// Its parameters are missing, unknown, or of another kind.
pub(super) const BAD_PARAMS: i32 = -32602;
/// The daemon refuses it; nothing is changed.
pub(super) const REFUSED: i32 = 1;
/// The client may only read.
pub(super) const NOT_ALLOWED: i32 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_that_is_no_request_is_answered_with_the_standards_code() {
        for (line, code) in [
            ("{", NO_JSON),
            ("\"\\ud800\"", NO_JSON),
            ("3", NO_REQUEST),
            ("[]", NO_REQUEST),
            (r#"[{"jsonrpc":"2.0","id":1,"method":"x"}]"#, NO_REQUEST),
            (r#"{"jsonrpc":"1.0","id":1,"method":"x"}"#, NO_REQUEST),
            (r#"{"jsonrpc":"2.0","id":[],"method":"x"}"#, NO_REQUEST),
            (r#"{"jsonrpc":"2.0","id":1}"#, NO_REQUEST),
        ] {
            let (failure, _) = parse(&mut line.as_bytes().to_vec()).unwrap_err();
            assert_eq!(failure.code, code, "{line}: {}", failure.message);
        }
        // Nested more deeply than anybody writes by hand.
        let deep = "[".repeat(100_000);
        assert_eq!(parse(&mut deep.into_bytes()).unwrap_err().0.code, NO_JSON);
    }

    #[test]
    fn request_without_an_id_wants_no_answer_and_one_with_null_does() {
        let of = |line: &str| parse(&mut line.as_bytes().to_vec()).unwrap().id;
        assert_eq!(of(r#"{"jsonrpc":"2.0","method":"x"}"#), None);
        assert_eq!(
            of(r#"{"jsonrpc":"2.0","method":"x","id":null}"#),
            Some(Value::Null)
        );
    }
}
