//! Which segments may go.

/// How much of a log is kept on disk. What either bound wants to drop is dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// At most about this many bytes, newest first; none for all.
    pub bytes: Option<u64>,
    /// Nothing whose newest entry is older than this, in milliseconds; none for all.
    pub age_ms: Option<u64>,
}

/// A segment, to decide about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Absolute offset of its first byte.
    pub start: u64,
    /// When it was begun, in milliseconds of Unix time.
    pub begun_ms: u64,
}

impl Keep {
    /// The offset to trim up to, of a log with these segments that ends at `end`. Never more than `allowed`, and never the
    /// segment that is being written.
    pub fn trim_to(&self, segments: &[Span], end: u64, now_ms: u64, allowed: u64) -> u64 {
        let mut to = segments.first().map_or(0, |first| first.start);
        for pair in segments.windows(2) {
            let next = pair[1];
            let too_much = self.bytes.is_some_and(|bytes| end - next.start >= bytes);
            // Its newest entry is older than the beginning of the next.
            let too_old = self.age_ms.is_some_and(|age| now_ms.saturating_sub(next.begun_ms) >= age);
            if next.start > allowed || !(too_much || too_old) {
                break;
            }
            to = next.start;
        }
        to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_age_decide_and_what_is_needed_stays() {
        let segments: Vec<Span> = (0..5).map(|n| Span { start: n * 100, begun_ms: n * 1000 }).collect();
        let keep = |bytes, age_ms| Keep { bytes, age_ms };
        let trim = |keep: Keep, allowed| keep.trim_to(&segments, 450, 5000, allowed);
        assert_eq!(trim(keep(None, None), 450), 0, "all is kept by default");
        assert_eq!(trim(keep(Some(250), None), 450), 200, "250 bytes remain");
        assert_eq!(trim(keep(Some(251), None), 450), 100, "never less than was asked for");
        assert_eq!(trim(keep(Some(0), None), 450), 400, "the newest stays");
        assert_eq!(trim(keep(None, Some(2000)), 450), 300, "the third ended when the fourth began");
        assert_eq!(trim(keep(Some(250), Some(2000)), 450), 300);
        assert_eq!(trim(keep(Some(0), None), 250), 200, "as far as is allowed");
        assert_eq!(keep(Some(0), None).trim_to(&[], 0, 0, 0), 0);
    }
}
