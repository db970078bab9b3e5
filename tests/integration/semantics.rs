//! What `docs/SEMANTICS.md` says. Its headings are the modules of this file or of its neighbours, and each of its sentences
//! names the tests that check it.

#[path = "semantics/behind.rs"]
mod behind;
#[path = "semantics/limits.rs"]
mod limits;
