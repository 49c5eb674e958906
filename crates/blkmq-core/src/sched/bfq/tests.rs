//! What cannot be seen from outside: the check finds what is broken.
