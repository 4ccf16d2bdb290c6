//! Assertions of the numbered invariants of `PROTOCOL.md`. They are on in every build: a log that has broken one must
//! stop rather than serve.

/// Asserts an invariant under its number, e.g. `invariant!(I6, covered, "slot {lsn} is not committed")`.
macro_rules! invariant {
    ($id:ident, $condition:expr, $($message:tt)+) => {
        assert!($condition, "invariant {} broken: {}", stringify!($id), format_args!($($message)+))
    };
}
