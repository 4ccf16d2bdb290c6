//! Accounts of the sending side.
