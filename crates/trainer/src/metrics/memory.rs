//! [`Memory`]: memory of the process and of the machine, on Linux by `/proc`, elsewhere by `sysinfo`.

/// Peak memory in use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memory {
    /// Peak bytes in use.
    pub bytes: u64,
    /// Total bytes, if known.
    pub total: Option<u64>,
}

impl Memory {
    /// Resident memory of the process, on Linux its peak, and total memory of the machine.
    pub fn of_process() -> Option<Self> {
        system::of_process()
    }

    /// Memory limit of this process in bytes, including swap: the machine's, or on Linux a lower
    /// limit of its container.
    pub fn of_machine() -> Option<u64> {
        system::of_machine()
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs;

    use super::Memory;

    const MACHINE: &str = "/proc/meminfo";

    pub(super) fn of_process() -> Option<Memory> {
        Some(Memory { bytes: proc_bytes("/proc/self/status", "VmHWM:")?, total: proc_bytes(MACHINE, "MemTotal:") })
    }

    pub(super) fn of_machine() -> Option<u64> {
        let machine = proc_bytes(MACHINE, "MemTotal:")? + proc_bytes(MACHINE, "SwapTotal:").unwrap_or(0);
        // Without a limit, the first file has a word and the second a large number.
        let container = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        let limits = container.iter().filter_map(|path| fs::read_to_string(path).ok()?.trim().parse().ok());
        Some(limits.fold(machine, u64::min))
    }

    /// Value of a key in a `/proc` file, in kB there, as bytes.
    fn proc_bytes(path: &str, key: &str) -> Option<u64> {
        let text = fs::read_to_string(path).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kib * 1024)
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use sysinfo::{MemoryRefreshKind, ProcessRefreshKind, ProcessesToUpdate, RefreshKind, System};

    use super::Memory;

    pub(super) fn of_process() -> Option<Memory> {
        let (mut system, id) = (machine(), sysinfo::get_current_pid().ok()?);
        let memory = ProcessRefreshKind::nothing().with_memory();
        system.refresh_processes_specifics(ProcessesToUpdate::Some(&[id]), false, memory);
        Some(Memory { bytes: system.process(id)?.memory(), total: Some(system.total_memory()) })
    }

    pub(super) fn of_machine() -> Option<u64> {
        let machine = machine();
        Some(machine.total_memory() + machine.total_swap()).filter(|bytes| *bytes > 0)
    }

    fn machine() -> System {
        System::new_with_specifics(RefreshKind::nothing().with_memory(MemoryRefreshKind::everything()))
    }
}
