//! Why a call failed: its code, and a text that the thread keeps until its next failure. `sys` has the calls.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use blkmq_engine::{Error, IoError};

use crate::code::Code;

/// A call that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    code: Code,
    /// None: the code says all.
    text: Option<String>,
}

impl Failure {
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Self {
        let text = Some(text.into());
        Self { code, text }
    }
}

impl From<Code> for Failure {
    fn from(code: Code) -> Self {
        Self { code, text: None }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::new(Code::from(&error), error.to_string())
    }
}

impl From<IoError> for Failure {
    fn from(error: IoError) -> Self {
        Code::from(error.status).into()
    }
}

/// Does the work of a call and returns its number, or the code of its failure, whose text the thread keeps. A panic
/// ends here.
#[inline]
pub(crate) fn guard<T: From<i32>>(work: impl FnOnce() -> Result<T, Failure>) -> T {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => value,
        Ok(Err(failure)) => keep(failure),
        Err(panic) => keep(of_panic(&*panic)),
    }
}

/// The same for a call at each I/O: no failure is made, carried or looked at unless `work` returns none. Then `else_`
/// does what is left to do, or says why not.
#[inline(always)]
pub(crate) fn guard_usual<T: From<i32>>(
    work: impl FnOnce() -> Option<T>,
    else_: impl FnOnce() -> Result<T, Failure>,
) -> T {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Some(value)) => value,
        Ok(None) => guard(else_),
        Err(panic) => keep(of_panic(&*panic)),
    }
}

#[cold]
fn of_panic(panic: &(dyn Any + Send)) -> Failure {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    let text = text.unwrap_or("without a text");
    Failure::new(Code::Panic, format!("a defect of the library: {text}"))
}

/// The text of the thread's last failure.
pub(crate) fn last() -> *const c_char {
    let place = LAST.try_with(|last| last.borrow().as_ref().map(|text| text.as_ptr()));
    place.ok().flatten().unwrap_or(Code::Ok.text().as_ptr())
}

#[cold]
fn keep<T: From<i32>>(failure: Failure) -> T {
    let text = failure.text.map_or_else(
        || failure.code.text().to_owned(),
        |text| CString::new(text.replace('\0', "\\0")).expect("no byte is 0"),
    );
    // A thread that ends has none.
    let _ = LAST.try_with(|last| last.replace(Some(text)));
    T::from(failure.code as i32)
}

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
}

/// The text of a code, also of one that is not known.
pub(crate) fn text_of(code: i32) -> &'static CStr {
    let known = Code::ALL.into_iter().find(|known| *known as i32 == code);
    known.map_or(c"not a code of blkmq", Code::text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last_text() -> String {
        crate::sys::tests::text(last())
    }

    #[test]
    fn panic_ends_as_a_code_with_its_text() {
        let code: i32 = guard(|| panic!("the test's own: {}", 7));
        assert_eq!(code, Code::Panic as i32);
        assert_eq!(last_text(), "a defect of the library: the test's own: 7");
        let code: i64 = guard(|| Err(Failure::new(Code::Engine, "a\0b")));
        assert_eq!((code, last_text()), (Code::Engine as i64, "a\\0b".to_owned()));
        assert_eq!(guard(|| Ok(5)), 5);
        std::thread::spawn(|| assert_eq!(last_text(), "no error"))
            .join()
            .unwrap();
    }

    #[test]
    fn every_code_has_a_number_and_a_text_of_its_own() {
        for (at, code) in Code::ALL.into_iter().enumerate() {
            assert_eq!(text_of(code as i32), code.text());
            for other in &Code::ALL[at + 1..] {
                assert!(
                    code as i32 != *other as i32 && code.text() != other.text(),
                    "{code:?}"
                );
            }
        }
        assert_eq!(text_of(-77), c"not a code of blkmq");
    }
}
