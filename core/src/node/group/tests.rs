//! Groups on a tiny network: members in one process, messages delivered in order, connections cut at will.

use super::*;

const TICK_NS: u64 = 1_000_000;

struct Net {
    groups: Vec<Option<RaftGroup>>,
    /// Connections that are cut, as (smaller, larger).
    cut: Vec<(usize, usize)>,
    now_ns: u64,
    learned: Vec<Vec<Learned>>,
    incarnations: u64,
}

impl Net {
    fn new(members: usize) -> Net {
        let mut net =
            Net { groups: Vec::new(), cut: Vec::new(), now_ns: 0, learned: vec![Vec::new(); members], incarnations: 0 };
        net.groups.resize_with(members, || None);
        (0..members).for_each(|m| net.start(m));
        net
    }

    fn start(&mut self, member: usize) {
        self.incarnations += 1;
        let nodes: Vec<u16> = (0..self.groups.len() as u16).map(|n| 10 + n).collect();
        let id = raft::member_id(self.incarnations, nodes[member]);
        self.groups[member] =
            Some(RaftGroup::new(GroupParts { nodes, own: member, id, tick_ns: TICK_NS, replicas: 9, journal: None }));
        self.learned[member].clear();
        for other in 0..self.groups.len() {
            self.connect(member, other);
        }
    }

    fn stop(&mut self, member: usize) {
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
                        if let Some(group) = &mut self.groups[to] {
                            group.receive(from, &bytes).unwrap();
                        }
                    }
                }
            }
            for (group, learned) in self.groups.iter_mut().zip(&mut self.learned) {
                while let Some(news) = group.as_mut().and_then(RaftGroup::learn) {
                    learned.push(news);
                }
                if let Some(group) = group.as_mut().filter(|g| g.wants_snapshot()) {
                    group.offer_snapshot(b"state".repeat(3000));
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

    fn committed(&self, member: usize) -> Vec<&[u8]> {
        self.learned[member]
            .iter()
            .filter_map(|l| if let Learned::Committed(p) = l { Some(&p[..]) } else { None })
            .collect()
    }
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
