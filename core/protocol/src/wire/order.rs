//! Entries of the order log. Decoding borrows from the message, so following the order stream allocates nothing.

use super::{DecodeError, Reader, Writer};
use crate::limits::{GRANT_CUTS_MAX, NUMBER_MAX, QUOTA_MAX, REPLICAS_MAX, SHARDS_MAX, WINDOW_CUTS_MAX};
use crate::types::{CutPoint, Lsn, Member, Position, ReplicaId, ShardId, WindowMode};

/// Bytes that hold any order entry.
pub const ORDER_ENTRY_BYTES_MAX: usize = 48 + SHARDS_MAX * MEMBER_BYTES;

const MEMBER_BYTES: usize = 16;
const LSN_BYTES: usize = 8;
const REPLICA_BYTES: usize = 16;

/// One committed statement about order or membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OrderEntry<'a> {
    /// Opens a window: the speculation lease.
    Grant(Grant<'a>),
    /// Binds positions of a fixed window up to a point.
    Cut {
        /// View in which it was decided.
        view: u32,
        /// How far positions are bound.
        point: CutPoint,
    },
    /// Binds positions of a free window: cut number `point.cut − 1` takes each member up to the listed lsn.
    FreeCut {
        /// View in which it was decided.
        view: u32,
        /// The point reached: whole cuts only.
        point: CutPoint,
        /// End of each member's bound slots, members in id order.
        lsns: Lsns<'a>,
    },
    /// A whole shard failed: its unbound slots up to the end of the last granted window are no-ops by decree.
    ViewChange {
        /// The view that begins.
        view: u32,
        /// The failed shard.
        shard: ShardId,
    },
    /// Who holds a shard's log from here on: a replica lost or gained, another primary, or the return of a failed shard.
    ShardChange(ShardChange<'a>),
    /// Only in a snapshot: a failure from before it that concerns positions beyond its base.
    Decree(Decree),
    /// What lies below a position is not kept any more. Void unless all of it is bound.
    Trim {
        /// View in which it was decided.
        view: u32,
        /// First position that is kept.
        upto: Position,
    },
}

/// See [`OrderEntry::Decree`]; the fields are those of [`Failed`](crate::ledger::Failed).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decree {
    /// The view that the failure began.
    pub view: u32,
    /// The shard.
    pub shard: ShardId,
    /// First position that was not bound.
    pub from: Position,
    /// End of the last window granted by then.
    pub lease_end: Position,
    /// First slot that was not bound.
    pub lsn: Lsn,
}

/// See [`OrderEntry::ShardChange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardChange<'a> {
    /// View in which it was decided.
    pub view: u32,
    /// The shard.
    pub shard: ShardId,
    /// Counts the shard's changes, from 1: the entry is void unless it is the next one.
    pub change: u32,
    /// Counts the shard's primaries.
    pub epoch: u32,
    /// The number of the primary, which is a member.
    pub primary: u16,
    /// Only in a snapshot: the change with which the shard began, or returned last; else 0.
    pub since_failure: u32,
    /// Who holds the log. None only in a snapshot: the shard has failed.
    pub members: Replicas<'a>,
}

/// The members of a shard, still in wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicas<'a>(&'a [u8]);

impl Replicas<'_> {
    /// Number of members.
    pub fn len(&self) -> usize {
        self.0.len() / REPLICA_BYTES
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The members, by number.
    pub fn iter(&self) -> impl Iterator<Item = ReplicaId> + '_ {
        self.0.chunks_exact(REPLICA_BYTES).map(|bytes| {
            let mut r = Reader::new(bytes);
            let (incarnation, number) = (r.u64().unwrap_or_default(), r.u16().unwrap_or_default());
            ReplicaId { number, incarnation }
        })
    }
}

/// The grant of a window, or, in a snapshot for a late follower, of several equal ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant<'a> {
    /// View in which it was decided.
    pub view: u32,
    /// How positions are bound.
    pub mode: WindowMode,
    /// First window opened.
    pub window: u64,
    /// Windows opened: 1 in the order log.
    pub windows: u32,
    /// Cuts in each window.
    pub cuts: u32,
    /// Cuts of the first window left out at its start: 0 in the order log.
    pub first_cut: u32,
    /// Position of the first slot.
    pub start: Position,
    /// Shards, in id order, with their quotas and first slots.
    pub members: Members<'a>,
}

/// The members of a grant, still in wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Members<'a>(&'a [u8]);

impl Members<'_> {
    /// Number of members.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.0.len() / MEMBER_BYTES
    }

    /// The members in id order.
    pub fn iter(&self) -> impl Iterator<Item = Member> + '_ {
        self.0.chunks_exact(MEMBER_BYTES).map(|bytes| {
            let mut r = Reader::new(bytes);
            let shard = ShardId(r.u16().unwrap_or_default());
            let closed = r.u16().unwrap_or_default();
            let quota = r.u32().unwrap_or_default();
            Member { shard, quota, first_lsn: Lsn(r.u64().unwrap_or_default()), open: closed == 0 }
        })
    }
}

/// A vector of lsns, still in wire form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lsns<'a>(&'a [u8]);

impl Lsns<'_> {
    /// Number of members.
    #[allow(clippy::len_without_is_empty)] // never empty
    pub fn len(&self) -> usize {
        self.0.len() / LSN_BYTES
    }

    /// The lsns in members' order.
    pub fn iter(&self) -> impl Iterator<Item = Lsn> + '_ {
        self.0.chunks_exact(LSN_BYTES).map(|bytes| Lsn(Reader::new(bytes).u64().unwrap_or_default()))
    }
}

/// Fixed part of a grant to encode; members are passed beside it.
#[derive(Clone, Copy, Debug)]
pub struct GrantHead {
    /// See [`Grant::view`].
    pub view: u32,
    /// See [`Grant::mode`].
    pub mode: WindowMode,
    /// See [`Grant::window`].
    pub window: u64,
    /// See [`Grant::windows`].
    pub windows: u32,
    /// See [`Grant::cuts`].
    pub cuts: u32,
    /// See [`Grant::first_cut`].
    pub first_cut: u32,
    /// See [`Grant::start`].
    pub start: Position,
}

/// Writes a grant; returns its length.
pub fn encode_grant(buffer: &mut [u8], head: GrantHead, members: &[Member]) -> usize {
    let mut w = Writer::new(buffer);
    let mode = match head.mode {
        WindowMode::Fixed => 0,
        WindowMode::Free => 1,
    };
    w.u8(1).u8(mode).u16(members.len() as u16).u32(head.view).u64(head.window).u64(head.start.0);
    w.u32(head.windows).u32(head.cuts).u32(head.first_cut);
    for member in members {
        w.u16(member.shard.0).u16(u16::from(!member.open)).u32(member.quota).u64(member.first_lsn.0);
    }
    w.len()
}

/// Writes a cut; returns its length.
pub fn encode_cut(buffer: &mut [u8], view: u32, point: CutPoint) -> usize {
    let mut w = Writer::new(buffer);
    w.u8(2).u8(0).u16(point.prefix).u32(view).u64(point.window).u32(point.cut);
    w.len()
}

/// Writes the cut of a free window; returns its length.
pub fn encode_free_cut(buffer: &mut [u8], view: u32, point: CutPoint, lsns: &[Lsn]) -> usize {
    let mut w = Writer::new(buffer);
    w.u8(3).u8(0).u16(lsns.len() as u16).u32(view).u64(point.window).u32(point.cut);
    for lsn in lsns {
        w.u64(lsn.0);
    }
    w.len()
}

/// Writes a view change; returns its length.
pub fn encode_view_change(buffer: &mut [u8], view: u32, shard: ShardId) -> usize {
    let mut w = Writer::new(buffer);
    w.u8(4).u8(0).u16(shard.0).u32(view);
    w.len()
}

/// Fixed part of a change to encode; members are passed beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardChangeHead {
    /// See [`ShardChange::view`].
    pub view: u32,
    /// See [`ShardChange::shard`].
    pub shard: ShardId,
    /// See [`ShardChange::change`].
    pub change: u32,
    /// See [`ShardChange::epoch`].
    pub epoch: u32,
    /// See [`ShardChange::primary`].
    pub primary: u16,
    /// See [`ShardChange::since_failure`].
    pub since_failure: u32,
}

/// Writes a change of a shard's members; returns its length.
pub fn encode_shard_change(buffer: &mut [u8], head: ShardChangeHead, members: &[ReplicaId]) -> usize {
    let mut w = Writer::new(buffer);
    w.u8(5).u8(0).u16(head.shard.0).u32(head.view).u32(head.change).u32(head.epoch);
    w.u16(head.primary).u16(members.len() as u16).u32(head.since_failure);
    for member in members {
        w.u64(member.incarnation).u16(member.number).u16(0).u32(0);
    }
    w.len()
}

/// Writes a trim; returns its length.
pub fn encode_trim(buffer: &mut [u8], view: u32, upto: Position) -> usize {
    let mut w = Writer::new(buffer);
    w.u8(7).u8(0).u16(0).u32(view).u64(upto.0);
    w.len()
}

/// Writes a decree; returns its length.
pub fn encode_decree(buffer: &mut [u8], decree: &Decree) -> usize {
    let mut w = Writer::new(buffer);
    w.u8(6).u8(0).u16(decree.shard.0).u32(decree.view).u64(decree.from.0).u64(decree.lease_end.0).u64(decree.lsn.0);
    w.len()
}

impl<'a> OrderEntry<'a> {
    /// Reads an entry and checks every field that can be checked alone.
    ///
    /// # Errors
    /// When the bytes are not exactly one valid entry.
    pub fn decode(bytes: &'a [u8]) -> Result<OrderEntry<'a>, DecodeError> {
        let mut r = Reader::new(bytes);
        let (tag, detail, small, view) = (r.u8()?, r.u8()?, r.u16()?, r.u32()?);
        if tag != 1 && detail != 0 {
            return Err(DecodeError::Value("reserved"));
        }
        let entry = match tag {
            1 => OrderEntry::Grant(decode_grant(&mut r, detail, small, view)?),
            2 => OrderEntry::Cut { view, point: CutPoint { window: r.u64()?, cut: r.u32()?, prefix: small } },
            3 => {
                let point = CutPoint { window: r.u64()?, cut: r.u32()?, prefix: 0 };
                let members = usize::from(small);
                if members == 0 || members > SHARDS_MAX {
                    return Err(DecodeError::Value("members"));
                }
                OrderEntry::FreeCut { view, point, lsns: Lsns(r.bytes(members * LSN_BYTES)?) }
            }
            4 => OrderEntry::ViewChange { view, shard: ShardId(small) },
            5 => OrderEntry::ShardChange(decode_shard_change(&mut r, ShardId(small), view)?),
            6 => OrderEntry::Decree(Decree {
                view,
                shard: ShardId(small),
                from: Position(r.u64()?),
                lease_end: Position(r.u64()?),
                lsn: Lsn(r.u64()?),
            }),
            7 if small == 0 => OrderEntry::Trim { view, upto: Position(r.u64()?) },
            tag => return Err(DecodeError::Tag(tag)),
        };
        r.finish()?;
        if entry.is_possible() { Ok(entry) } else { Err(DecodeError::Value("number")) }
    }

    /// Whether its numbers can be those of a log: what follows from them does not overflow.
    fn is_possible(&self) -> bool {
        match self {
            OrderEntry::Grant(grant) => {
                let quotas: u64 = grant.members.iter().map(|m| u64::from(m.quota)).sum();
                let cuts = u64::from(grant.windows) * u64::from(grant.cuts);
                cuts <= GRANT_CUTS_MAX
                    && u128::from(quotas) * u128::from(cuts) <= u128::from(NUMBER_MAX)
                    && grant.start.0 <= NUMBER_MAX
                    && grant.window <= NUMBER_MAX
                    && grant.members.iter().all(|m| m.first_lsn.0 <= NUMBER_MAX)
            }
            OrderEntry::Cut { point, .. } => point.window <= NUMBER_MAX,
            OrderEntry::FreeCut { point, lsns, .. } => {
                point.window <= NUMBER_MAX && lsns.iter().all(|lsn| lsn.0 <= NUMBER_MAX)
            }
            OrderEntry::Trim { upto, .. } => upto.0 <= NUMBER_MAX,
            OrderEntry::ViewChange { view, .. } => *view != u32::MAX,
            OrderEntry::ShardChange(change) => change.change != u32::MAX && change.epoch != u32::MAX,
            OrderEntry::Decree(decree) => {
                let numbers = [decree.from.0, decree.lease_end.0, decree.lsn.0];
                decree.view != u32::MAX && numbers.iter().all(|number| *number <= NUMBER_MAX)
            }
        }
    }
}

fn decode_shard_change<'a>(r: &mut Reader<'a>, shard: ShardId, view: u32) -> Result<ShardChange<'a>, DecodeError> {
    let (change, epoch, primary, count) = (r.u32()?, r.u32()?, r.u16()?, usize::from(r.u16()?));
    let since_failure = r.u32()?;
    if count > REPLICAS_MAX || change == 0 || since_failure > change {
        return Err(DecodeError::Value("members"));
    }
    let members = Replicas(r.bytes(count * REPLICA_BYTES)?);
    if members.0.chunks_exact(REPLICA_BYTES).any(|m| m[10..].iter().any(|b| *b != 0)) {
        return Err(DecodeError::Value("reserved"));
    }
    let numbers = || members.iter().map(|m| m.number);
    if numbers().any(|n| usize::from(n) >= REPLICAS_MAX) || !numbers().is_sorted_by(|a, b| a < b) {
        return Err(DecodeError::Value("member order"));
    }
    if count > 0 && !numbers().any(|n| n == primary) {
        return Err(DecodeError::Value("primary"));
    }
    Ok(ShardChange { view, shard, change, epoch, primary, since_failure, members })
}

fn decode_grant<'a>(r: &mut Reader<'a>, mode: u8, members: u16, view: u32) -> Result<Grant<'a>, DecodeError> {
    let mode = match mode {
        0 => WindowMode::Fixed,
        1 => WindowMode::Free,
        _ => return Err(DecodeError::Value("mode")),
    };
    let window = r.u64()?;
    let start = Position(r.u64()?);
    let (windows, cuts, first_cut) = (r.u32()?, r.u32()?, r.u32()?);
    let count = usize::from(members);
    if count == 0 || count > SHARDS_MAX {
        return Err(DecodeError::Value("members"));
    }
    let members = Members(r.bytes(count * MEMBER_BYTES)?);
    if members.0.chunks_exact(MEMBER_BYTES).any(|m| m[2] > 1 || m[3] != 0) {
        return Err(DecodeError::Value("closed"));
    }
    let mut previous = None;
    let mut quota_sum = 0u64;
    for member in members.iter() {
        if previous.is_some_and(|p| p >= member.shard) {
            return Err(DecodeError::Value("member order"));
        }
        if member.quota > QUOTA_MAX || (mode == WindowMode::Free && member.quota != 0) {
            return Err(DecodeError::Value("quota"));
        }
        previous = Some(member.shard);
        quota_sum += u64::from(member.quota);
    }
    if mode == WindowMode::Fixed && quota_sum == 0 {
        return Err(DecodeError::Value("quota"));
    }
    if windows == 0 || cuts == 0 || cuts > WINDOW_CUTS_MAX || first_cut >= cuts {
        return Err(DecodeError::Value("cuts"));
    }
    Ok(Grant { view, mode, window, windows, cuts, first_cut, start, members })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMBERS: [Member; 2] = [
        Member { shard: ShardId(0), quota: 2, first_lsn: Lsn(200), open: true },
        Member { shard: ShardId(7), quota: 3, first_lsn: Lsn(300), open: false },
    ];
    const HEAD: GrantHead = GrantHead {
        view: 1,
        mode: WindowMode::Fixed,
        window: 4,
        windows: 1,
        cuts: 100,
        first_cut: 0,
        start: Position(2000),
    };

    #[test]
    fn entries_come_back() {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let len = encode_grant(&mut buffer, HEAD, &MEMBERS);
        assert_eq!(len, 36 + 32);
        let Ok(OrderEntry::Grant(grant)) = OrderEntry::decode(&buffer[..len]) else { panic!("not a grant") };
        assert_eq!((grant.window, grant.start, grant.cuts, grant.view), (4, Position(2000), 100, 1));
        assert!(grant.members.iter().eq(MEMBERS));

        let point = CutPoint { window: 4, cut: 17, prefix: 1 };
        let len = encode_cut(&mut buffer, 1, point);
        assert_eq!(OrderEntry::decode(&buffer[..len]), Ok(OrderEntry::Cut { view: 1, point }));

        let whole = CutPoint { prefix: 0, ..point };
        let len = encode_free_cut(&mut buffer, 1, whole, &[Lsn(5), Lsn(6)]);
        let Ok(OrderEntry::FreeCut { lsns, .. }) = OrderEntry::decode(&buffer[..len]) else { panic!("not a cut") };
        assert!(lsns.iter().eq([Lsn(5), Lsn(6)]));

        let len = encode_view_change(&mut buffer, 2, ShardId(7));
        assert_eq!(OrderEntry::decode(&buffer[..len]), Ok(OrderEntry::ViewChange { view: 2, shard: ShardId(7) }));

        let len = encode_trim(&mut buffer, 2, Position(9));
        assert_eq!(OrderEntry::decode(&buffer[..len]), Ok(OrderEntry::Trim { view: 2, upto: Position(9) }));
    }

    #[test]
    fn changes_of_a_shards_members_come_back_and_impossible_ones_are_refused() {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let head = ShardChangeHead { view: 1, shard: ShardId(7), change: 3, epoch: 2, primary: 4, since_failure: 2 };
        let members = [(0, 9), (4, u64::MAX)].map(|(number, incarnation)| ReplicaId { number, incarnation });
        let len = encode_shard_change(&mut buffer, head, &members);
        assert_eq!(len, 24 + 32);
        let Ok(OrderEntry::ShardChange(change)) = OrderEntry::decode(&buffer[..len]) else { panic!("not a change") };
        assert_eq!((change.view, change.shard, change.change), (1, ShardId(7), 3));
        assert_eq!((change.epoch, change.primary, change.since_failure), (2, 4, 2));
        assert!(change.members.iter().eq(members));
        for end in 0..len {
            assert!(OrderEntry::decode(&buffer[..end]).is_err(), "a prefix of {end} bytes was taken");
        }
        let elsewhere = ShardChangeHead { primary: 1, ..head };
        let len = encode_shard_change(&mut buffer, elsewhere, &members);
        assert_eq!(OrderEntry::decode(&buffer[..len]), Err(DecodeError::Value("primary")));
        let len = encode_shard_change(&mut buffer, head, &[members[1], members[0]]);
        assert_eq!(OrderEntry::decode(&buffer[..len]), Err(DecodeError::Value("member order")));
        let decree = Decree { view: 2, shard: ShardId(1), from: Position(3), lease_end: Position(4), lsn: Lsn(5) };
        let len = encode_decree(&mut buffer, &decree);
        assert_eq!(OrderEntry::decode(&buffer[..len]), Ok(OrderEntry::Decree(decree)));
        let len = encode_shard_change(&mut buffer, head, &[]);
        assert!(OrderEntry::decode(&buffer[..len]).is_ok(), "a failed shard in a snapshot");
    }

    #[test]
    fn what_is_not_exactly_one_valid_entry_is_refused() {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let len = encode_grant(&mut buffer, HEAD, &MEMBERS);
        for end in 0..len {
            assert!(OrderEntry::decode(&buffer[..end]).is_err(), "a prefix of {end} bytes was taken");
        }
        assert_eq!(OrderEntry::decode(&buffer[..len + 1]), Err(DecodeError::Trailing));
        let zero = MEMBERS.map(|m| Member { quota: 0, ..m });
        let len = encode_grant(&mut buffer, HEAD, &zero);
        assert_eq!(OrderEntry::decode(&buffer[..len]), Err(DecodeError::Value("quota")));
        let swapped = [MEMBERS[1], MEMBERS[0]];
        let len = encode_grant(&mut buffer, HEAD, &swapped);
        assert_eq!(OrderEntry::decode(&buffer[..len]), Err(DecodeError::Value("member order")));
    }

    #[test]
    fn numbers_that_no_log_reaches_are_refused() {
        let mut buffer = [0; ORDER_ENTRY_BYTES_MAX];
        let (most, number) = (NUMBER_MAX, Err(DecodeError::Value("number")));
        for (value, is_taken) in [(most, true), (most + 1, false), (u64::MAX, false)] {
            let point = CutPoint { window: value, cut: 1, prefix: 0 };
            let len = encode_cut(&mut buffer, 0, point);
            assert_eq!(OrderEntry::decode(&buffer[..len]).is_ok(), is_taken);
            let len = encode_free_cut(&mut buffer, 0, CutPoint { window: 1, cut: 1, prefix: 0 }, &[Lsn(value)]);
            assert_eq!(OrderEntry::decode(&buffer[..len]).is_ok(), is_taken);
            let len = encode_grant(&mut buffer, GrantHead { start: Position(value), ..HEAD }, &MEMBERS);
            assert_eq!(OrderEntry::decode(&buffer[..len]).is_ok(), is_taken);
        }
        let decree =
            Decree { view: 2, shard: ShardId(1), from: Position(0), lease_end: Position(most), lsn: Lsn(most) };
        for (impossible, is_taken) in [
            (decree, true),
            (Decree { view: u32::MAX, ..decree }, false),
            (Decree { from: Position(most + 1), ..decree }, false),
            (Decree { lease_end: Position(most + 1), ..decree }, false),
            (Decree { lsn: Lsn(most + 1), ..decree }, false),
        ] {
            let len = encode_decree(&mut buffer, &impossible);
            assert_eq!(OrderEntry::decode(&buffer[..len]).is_ok(), is_taken, "{impossible:?}");
        }
        let head = ShardChangeHead { view: 1, shard: ShardId(1), change: 1, epoch: 1, primary: 0, since_failure: 0 };
        for last in [ShardChangeHead { change: u32::MAX, ..head }, ShardChangeHead { epoch: u32::MAX, ..head }] {
            let len = encode_shard_change(&mut buffer, last, &[ReplicaId { number: 0, incarnation: 9 }]);
            assert_eq!(OrderEntry::decode(&buffer[..len]), number);
        }
        let len = encode_view_change(&mut buffer, u32::MAX, ShardId(1));
        assert_eq!(OrderEntry::decode(&buffer[..len]), number);
        let many = GrantHead { windows: u32::MAX, cuts: WINDOW_CUTS_MAX, ..HEAD };
        let len = encode_grant(&mut buffer, many, &MEMBERS);
        assert_eq!(OrderEntry::decode(&buffer[..len]), number);
    }
}
