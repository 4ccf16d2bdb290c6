//! What answers to questions about the log say: reads, and questions for the tail.

use super::{Answer, Oracle, Violation, matches};

impl Oracle {
    /// The answer to a question for the tail asked when `floor` was the highest acknowledged position.
    pub(in crate::sim) fn tail(&mut self, floor: Option<u64>, position: u64) {
        let committed = self.order.committed();
        self.reached.tails += 1;
        if position > committed || floor.is_some_and(|floor| floor >= position) {
            let what = format!("the tail is {position}, bound are {committed}, acknowledged before was {floor:?}");
            self.complain(Violation::new("I5", what));
        }
    }

    /// The highest position acknowledged so far.
    pub(in crate::sim) fn floor(&self) -> Option<u64> {
        self.acknowledged_to
    }

    /// The answer to a read.
    pub(in crate::sim) fn read(&mut self, position: u64, answer: &Answer<'_>) {
        self.reached.reads += 1;
        let result = self.judge_read(position, answer);
        self.check(result);
    }

    fn judge_read(&mut self, position: u64, answer: &Answer<'_>) -> Result<(), Violation> {
        let wrong = |what: &str| Err(Violation::new("I4", format!("a read of position {position} {what}")));
        if position >= self.order.committed() {
            return wrong("is answered before it is bound");
        }
        let Some(place) = self.order.locate(position) else { return wrong("is bound and nowhere") };
        let truth = &self.shards[usize::from(place.shard)];
        let entry = truth.entry(place.lsn).filter(|_| !place.void);
        // What a whole shard has lost is not there for a while, or for ever; it never becomes something else.
        match (answer, entry.and_then(|entry| entry.record)) {
            (Answer::Trimmed(head), _) if self.may_trim => {
                self.reached.trims += 1;
                if *head > position { Ok(()) } else { wrong(&format!("says that the log begins at {head}")) }
            }
            (Answer::Unavailable, _) if !place.void && self.order.members.may_lack(place.shard, place.lsn) => {
                self.reached.unavailable += 1;
                Ok(())
            }
            (Answer::NoOp, None) => Ok(()),
            (Answer::Record(bytes), Some(record)) if matches(record, self.records[record as usize].len, bytes) => {
                Ok(())
            }
            (answer, record) => {
                let got = match answer {
                    Answer::Record(bytes) => format!("a record of {} bytes", bytes.len()),
                    Answer::NoOp => "no record".into(),
                    Answer::Unavailable => "unavailable".into(),
                    Answer::Trimmed(head) => format!("trimmed below {head}"),
                };
                wrong(&format!("returns {got}, it holds record {record:?}"))
            }
        }
    }
}
