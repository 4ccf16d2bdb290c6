//! Groups on a tiny network: members in one process, messages delivered in order, connections cut at will.

use std::cell::RefCell;
use std::rc::Rc;

use super::journal::Journal;
use super::wire::GroupMessage;
use super::*;
use crate::sim::disk::SimDisk;
use crate::sim::rng::Rng;

const TICK_NS: u64 = 1_000_000;

struct Net {
    groups: Vec<Option<RaftGroup>>,
    /// Connections that are cut, as (smaller, larger).
    cut: Vec<(usize, usize)>,
    /// Snapshots leave and do not arrive.
    loses_snapshots: bool,
    now_ns: u64,
    learned: Vec<Vec<Learned>>,
    incarnations: u64,
    /// One a member, or none.
    disks: Vec<Rc<RefCell<SimDisk>>>,
}

impl Net {
    fn new(members: usize) -> Net {
        Net::with_disks(members, Vec::new())
    }

    /// Members whose journals take up to half a tick to keep a record.
    fn on_disks(members: usize, seed: u64) -> Net {
        let disk = |member| SimDisk::new(Rng::new(seed, member as u64), TICK_NS / 2);
        Net::with_disks(members, (0..members).map(disk).collect())
    }

    fn with_disks(members: usize, disks: Vec<Rc<RefCell<SimDisk>>>) -> Net {
        let learned = vec![Vec::new(); members];
        let (groups, cut, loses_snapshots) = (Vec::new(), Vec::new(), false);
        let mut net = Net { groups, cut, loses_snapshots, now_ns: 0, learned, incarnations: 0, disks };
        net.groups.resize_with(members, || None);
        (0..members).for_each(|m| net.start(m));
        net
    }

    fn start(&mut self, member: usize) {
        self.incarnations += 1;
        let nodes: Vec<u16> = (0..self.groups.len() as u16).map(|n| 10 + n).collect();
        let id = raft::member_id(self.incarnations, nodes[member]);
        let journal = self.disks.get(member).map(|disk| {
            let (journal, recovered) = SimDisk::open(disk, id, true);
            (Box::new(journal) as Box<dyn Journal>, recovered)
        });
        let parts = GroupParts { nodes, own: member, id, tick_ns: TICK_NS, replicas: 9, journal };
        self.groups[member] = Some(RaftGroup::new(parts));
        self.learned[member].clear();
        for other in 0..self.groups.len() {
            self.connect(member, other);
        }
    }

    /// The member's machine stops, and with it what its disk was about to keep.
    fn stop(&mut self, member: usize) {
        if let Some(disk) = self.disks.get(member) {
            disk.borrow_mut().crash();
        }
        self.groups[member] = None;
        for other in self.groups.iter_mut().flatten() {
            other.disconnected(member);
        }
    }

    fn connected(&self, a: usize, b: usize) -> bool {
        a != b && !self.cut.contains(&(a.min(b), a.max(b)))
    }

    fn connect(&mut self, a: usize, b: usize) {
        if self.connected(a, b) && self.groups[a].is_some() && self.groups[b].is_some() {
            self.group(a).connected(b);
            self.group(b).connected(a);
        }
    }

    fn isolate(&mut self, member: usize) {
        for other in 0..self.groups.len() {
            if self.connected(member, other) {
                self.cut.push((member.min(other), member.max(other)));
                for (a, b) in [(member, other), (other, member)] {
                    if let Some(group) = &mut self.groups[a] {
                        group.disconnected(b);
                    }
                }
            }
        }
    }

    fn heal(&mut self) {
        for (a, b) in std::mem::take(&mut self.cut) {
            self.connect(a, b);
        }
    }

    fn group(&mut self, member: usize) -> &mut RaftGroup {
        self.groups[member].as_mut().unwrap()
    }

    /// Delivers everything that is under way.
    fn deliver(&mut self) {
        loop {
            let mut moved = false;
            for from in 0..self.groups.len() {
                for to in 0..self.groups.len() {
                    if self.groups[from].is_none() || !self.connected(from, to) {
                        continue;
                    }
                    while let Some(bytes) = self.group(from).outgoing(to).map(<[u8]>::to_vec) {
                        self.group(from).sent(to);
                        moved = true;
                        let is_chunk = matches!(GroupMessage::decode(&bytes), Ok((GroupMessage::Chunk { .. }, _)));
                        if let Some(group) = self.groups[to].as_mut().filter(|_| !(is_chunk && self.loses_snapshots)) {
                            group.receive(from, &bytes).unwrap();
                        }
                    }
                }
            }
            for (group, learned) in self.groups.iter_mut().zip(&mut self.learned) {
                while let Some(news) = group.as_mut().and_then(RaftGroup::learn) {
                    learned.push(news);
                }
            }
            for member in 0..self.groups.len() {
                if self.groups[member].as_ref().is_some_and(RaftGroup::wants_snapshot) {
                    let state =
                        if self.disks.is_empty() { b"state".repeat(3000) } else { self.state_of(member).concat() };
                    self.group(member).offer_snapshot(state);
                }
            }
            if !moved {
                return;
            }
        }
    }

    fn run(&mut self, ticks: u64) {
        for _ in 0..ticks {
            self.now_ns += TICK_NS;
            let now_ns = self.now_ns;
            self.groups.iter_mut().flatten().for_each(|g| g.tick(now_ns));
            self.deliver();
            // What was kept meanwhile lets messages go.
            for part in 1..4 {
                let now_ns = now_ns + part * TICK_NS / 4;
                for group in self.groups.iter_mut().flatten() {
                    group.tick(now_ns);
                    group.settle(now_ns);
                }
                self.deliver();
            }
        }
    }

    fn leaders(&self) -> Vec<usize> {
        let leads = |m: &usize| self.groups[*m].as_ref().is_some_and(|g| g.leads().is_some());
        (0..self.groups.len()).filter(leads).collect()
    }

    fn leader(&mut self) -> usize {
        for _ in 0..100 {
            self.run(1);
            if let [leader] = self.leaders()[..] {
                return leader;
            }
        }
        panic!("no leader after 100 ticks");
    }

    /// All that a member has learned: its state.
    fn state_of(&self, member: usize) -> Vec<Vec<u8>> {
        let mut state = Vec::new();
        for news in &self.learned[member] {
            match news {
                Learned::Committed(payload) => state.push(payload[..4].to_vec()),
                Learned::Installed(bytes) => state = bytes.chunks(4).map(<[u8]>::to_vec).collect(),
                Learned::Leads { .. } | Learned::Follows => {}
            }
        }
        state
    }

    /// What a member has learned is what is known so far, or goes on from there.
    fn compare(&self, member: usize, truth: &mut Vec<Vec<u8>>) {
        let state = self.state_of(member);
        let common = state.len().min(truth.len());
        assert!(state[..common] == truth[..common], "member {member} has learned something else");
        truth.extend_from_slice(&state[common..]);
    }

    fn committed(&self, member: usize) -> Vec<&[u8]> {
        self.learned[member]
            .iter()
            .filter_map(|l| if let Learned::Committed(p) = l { Some(&p[..]) } else { None })
            .collect()
    }
}

#[test]
fn a_leader_whose_connections_close_is_followed_without_waiting_for_its_silence() {
    for lost in 0..3 {
        let mut net = Net::new(3);
        let leader = net.leader();
        if leader != lost {
            net.group(leader).transfer_leadership(lost);
            net.run(4);
        }
        assert_eq!(net.leader(), lost);
        net.stop(lost);
        // A member's patience is ten ticks at least.
        net.run(7);
        assert_eq!(net.leaders().len(), 1, "member {lost} was lost");
    }
}

#[test]
fn a_leader_that_one_member_alone_cannot_reach_leads_on() {
    let mut net = Net::new(3);
    let leader = net.leader();
    let other = (leader + 1) % 3;
    net.cut.push((leader.min(other), leader.max(other)));
    for (a, b) in [(leader, other), (other, leader)] {
        net.group(a).disconnected(b);
    }
    let term = net.group(leader).leads();
    net.run(100);
    assert_eq!((net.leaders(), net.group(leader).leads()), (vec![leader], term));
}

#[test]
fn members_found_a_group_elect_a_leader_and_commit() {
    for members in [1, 3, 5] {
        let mut net = Net::new(members);
        let leader = net.leader();
        assert_eq!(leader, 0, "the first has the least patience");
        for payload in [&b"a"[..], b"b", b"c"] {
            assert!(net.group(leader).propose(payload.to_vec()));
        }
        net.run(5);
        for member in 0..members {
            assert_eq!(net.committed(member), [b"a", b"b", b"c"], "member {member} of {members}");
        }
    }
}

#[test]
fn nobody_founds_a_group_while_a_member_is_missing() {
    let mut net = Net::new(3);
    net.isolate(2);
    net.run(50);
    assert_eq!(net.leaders(), []);
    net.heal();
    net.leader();
}

#[test]
fn a_leader_that_is_cut_off_stops_and_what_it_proposed_is_lost() {
    let mut net = Net::new(3);
    let old = net.leader();
    net.isolate(old);
    assert!(net.group(old).propose(b"late".to_vec()), "it does not know yet");
    net.run(40);
    let [new] = net.leaders()[..] else { panic!("{:?} lead", net.leaders()) };
    assert_ne!(new, old);
    assert!(!net.group(old).propose(b"later".to_vec()), "most of the others are silent: it leads no more");
    assert!(net.group(new).propose(b"new".to_vec()));
    net.run(5);
    net.heal();
    net.run(40);
    for member in 0..3 {
        assert_eq!(net.committed(member), [b"new"]);
    }
    assert_eq!(net.learned[old].first(), Some(&Learned::Leads { term: 2 }));
}

#[test]
fn a_late_proposal_of_an_old_leader_is_learned_before_the_new_one_leads() {
    let mut net = Net::new(3);
    let old = net.leader();
    // It reaches one member, and the leader is gone before anybody answers.
    assert!(net.group(old).propose(b"late".to_vec()));
    while let Some(bytes) = net.group(old).outgoing(1).map(<[u8]>::to_vec) {
        net.group(old).sent(1);
        net.group(1).receive(old, &bytes).unwrap();
    }
    net.stop(old);
    net.learned[1].clear();
    let new = net.leader();
    assert_eq!(new, 1, "the other one lacks an entry");
    let [Learned::Committed(late), Learned::Leads { .. }] = &net.learned[1][..] else {
        panic!("{:?}", net.learned[1]);
    };
    assert_eq!(late, b"late");
}

#[test]
fn a_member_that_lost_its_memory_comes_back_as_another() {
    let mut net = Net::new(3);
    let leader = net.leader();
    assert!(net.group(leader).propose(b"a".to_vec()));
    net.run(5);
    net.stop(2);
    net.run(30);
    net.start(2);
    net.run(30);
    let id = net.group(2).id();
    let (voters, learners) = net.group(leader).members();
    assert!(voters.contains(&id) && voters.len() == 3 && learners.is_empty(), "{voters:?}, {learners:?}");
    let missed = Learned::Installed(b"state".repeat(3000));
    assert!(net.learned[2].first() == Some(&missed), "it gets what it missed");
    assert!(net.group(leader).propose(b"b".to_vec()));
    net.stop(leader);
    net.leader();
}

#[test]
fn one_that_is_far_behind_gets_a_snapshot() {
    let mut net = Net::new(3);
    let leader = net.leader();
    net.isolate(2);
    for number in 0..10_000u32 {
        assert!(net.group(leader).propose(number.to_le_bytes().to_vec()));
        net.deliver();
    }
    net.heal();
    net.run(30);
    let state = Learned::Installed(b"state".repeat(3000));
    assert_eq!(net.learned[2].iter().filter(|l| **l == state).count(), 1);
    assert!(net.group(leader).propose(b"after".to_vec()));
    net.run(5);
    assert_eq!(net.committed(2).last(), Some(&&b"after"[..]));
}

#[test]
fn a_snapshot_that_was_lost_with_a_connection_is_given_again() {
    let mut net = Net::new(3);
    let leader = net.leader();
    assert_eq!(leader, 0);
    net.isolate(2);
    for number in 0..10_000u32 {
        assert!(net.group(leader).propose(number.to_le_bytes().to_vec()));
        net.deliver();
    }
    net.loses_snapshots = true;
    net.heal();
    net.run(8);
    net.isolate(2);
    net.loses_snapshots = false;
    net.heal();
    net.run(30);
    assert_eq!(net.leaders(), [leader]);
    let state = Learned::Installed(b"state".repeat(3000));
    assert_eq!(net.learned[2].iter().filter(|l| **l == state).count(), 1);
}

#[test]
fn leadership_moves_on_request_and_reads_need_most_members() {
    let mut net = Net::new(3);
    let leader = net.leader();
    let first = net.group(leader).ask_read();
    net.deliver();
    assert_eq!(net.group(leader).reads_granted(), first);
    net.isolate(leader);
    let second = net.group(leader).ask_read();
    net.run(3);
    assert_eq!(net.group(leader).reads_granted(), first, "nobody else says that it leads");
    assert_ne!(second, first);
    net.heal();
    // The others have a leader of their own by now; the old one hears of it.
    net.run(20);
    let leader = net.leader();
    let next = (leader + 1) % 3;
    net.group(leader).transfer_leadership(next);
    net.run(2);
    assert_eq!(net.leaders(), [next]);
}

#[test]
fn members_say_which_replicas_they_hear() {
    let mut net = Net::new(3);
    let leader = net.leader();
    net.group(1).hear(8);
    net.run(2);
    assert_eq!(net.group(leader).heard_elsewhere(8), Some(1));
    assert_eq!(net.group(leader).heard_elsewhere(7), None);
    net.run(40);
    assert_eq!(net.group(leader).heard_elsewhere(8), None, "that was long ago");
}

#[test]
fn a_leader_whose_disk_is_full_hands_over_and_follows() {
    for lost in 0..3 {
        let mut net = Net::on_disks(3, 1);
        let leader = net.leader();
        if leader != lost {
            net.group(leader).transfer_leadership(lost);
            net.run(10);
        }
        assert_eq!(net.leader(), lost);
        net.disks[lost].borrow_mut().full = true;
        // Well before a silent leader would be followed.
        net.run(8);
        let [next] = net.leaders()[..] else { panic!("{:?} lead", net.leaders()) };
        assert_ne!(next, lost);
        for number in 0..20u32 {
            assert!(net.group(next).propose(number.to_le_bytes().to_vec()));
            net.run(2);
        }
        assert_eq!((net.leaders(), net.committed(next).len()), (vec![next], 20));
        net.disks[lost].borrow_mut().full = false;
        net.run(10);
        assert_eq!(net.committed(lost).len(), 20);
    }
}

#[test]
fn members_come_back_with_what_they_have_kept() {
    let mut net = Net::on_disks(3, 1);
    let leader = net.leader();
    for payload in [&b"aaaa"[..], b"bbbb"] {
        assert!(net.group(leader).propose(payload.to_vec()));
        net.run(2);
    }
    let ids: Vec<u64> = (0..3).map(|m| net.group(m).id()).collect();
    (0..3).for_each(|m| net.stop(m));
    (0..3).for_each(|m| net.start(m));
    net.leader();
    net.run(5);
    for (member, id) in ids.into_iter().enumerate() {
        assert_eq!(net.group(member).id(), id, "they are the same members");
        assert_eq!(net.committed(member), [b"aaaa", b"bbbb"]);
    }
}

/// Members crash and come back all the time; whatever one of them learned, every other one learns, in the same order.
#[test]
fn nothing_that_was_learned_is_ever_lost_or_changed() {
    let (mut committed, mut crashes, mut installed) = (0, 0, 0);
    for seed in 0..25 {
        let mut rng = Rng::new(seed, 9);
        let members = rng.pick(&[1usize, 3, 3, 5]);
        let mut net = Net::on_disks(members, seed);
        let mut proposed = 0u32;
        // What is known to be committed: by index, from the first that learned it.
        let mut truth: Vec<Vec<u8>> = Vec::new();
        for _ in 0..120 {
            net.run(rng.range(1, 8));
            for member in net.leaders() {
                for _ in 0..rng.below(40) {
                    proposed += 1;
                    let payload = [&proposed.to_le_bytes()[..], &[7; 200]].concat();
                    net.group(member).propose(payload);
                }
            }
            match rng.below(6) {
                0 => {
                    let member = rng.below(members as u64) as usize;
                    net.stop(member);
                    net.start(member);
                    crashes += 1;
                }
                1 if members > 1 => net.isolate(rng.below(members as u64) as usize),
                2 => net.heal(),
                _ => {}
            }
            for member in 0..members {
                net.compare(member, &mut truth);
            }
        }
        net.heal();
        net.run(100);
        (0..members).for_each(|member| net.compare(member, &mut truth));
        let all: Vec<usize> = (0..members).map(|m| net.state_of(m).len()).collect();
        assert!(all.iter().all(|len| *len == truth.len()), "seed {seed}: {all:?} of {}", truth.len());
        committed += truth.len();
        installed += net.learned.iter().flatten().filter(|l| matches!(l, Learned::Installed(_))).count();
    }
    assert!(committed > 8_000 && crashes > 200 && installed > 8, "{committed}, {crashes}, {installed}");
}

#[test]
fn garbage_is_refused_and_harms_nobody() {
    let mut net = Net::new(3);
    let leader = net.leader();
    let mut state = 1u64;
    for len in 0..400usize {
        let bytes: Vec<u8> = (0..len)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 56) as u8
            })
            .collect();
        let _ = net.group(leader).receive(1, &bytes);
    }
    // Well-formed, but nothing a member would say.
    for kind in 1..=10u8 {
        let mut bytes = vec![67, kind, 0, 0, 0, 0, 0, 0];
        let (to, from) = (net.group(leader).id(), net.group(1).id());
        let far = 1 << 40;
        for word in [to, from, net.group(leader).leader().1, 1, far, far, 1, 0, far] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        let _ = net.group(leader).receive(1, &bytes);
    }
    net.leader();
}
