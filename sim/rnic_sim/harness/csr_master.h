// AXI4-Lite manager: runs queued register reads and writes, in order.
//
// Writes are pipelined (up to MAX_WRITES wait for their B, AW and W go out independently); a read waits until every
// write before it is answered, a write until every read before it is.
#pragma once
#include <deque>
#include <string>
#include <unordered_map>

#include "monitor.h"
#include "pins.h"

struct CsrResult { uint32_t data, response; };

class CsrMaster {
public:
    static constexpr size_t MAX_WRITES = 8;

    CsrMaster(NicModel& model, uint32_t nic, Monitor& monitor, Failure& failure)
        : m_nic(nic), m_monitor(monitor), m_failure(failure) {
#define BIND(name) m_pins.name = model.need("s_axil_" #name)
        BIND(awaddr); BIND(awvalid); BIND(awready); BIND(wdata); BIND(wstrb); BIND(wvalid); BIND(wready);
        BIND(bresp); BIND(bvalid); BIND(bready); BIND(araddr); BIND(arvalid); BIND(arready);
        BIND(rdata); BIND(rresp); BIND(rvalid); BIND(rready);
#undef BIND
    }

    // A posted operation leaves no result; an error answer to it is counted in `posted_errors`.
    uint64_t queue(bool write, uint32_t address, uint32_t data, bool posted) {
        m_queue.push_back({++m_last_ticket, address, data, write, posted});
        return m_last_ticket;
    }
    bool take(uint64_t ticket, CsrResult& result) {
        auto found = m_done.find(ticket);
        if (found == m_done.end()) return false;
        result = found->second;
        m_done.erase(found);
        return true;
    }
    bool idle() const { return m_queue.empty() && m_waiting.empty(); }

    bool completed = false;  // an operation that somebody waits for ended since the flag was cleared
    uint64_t posted_errors = 0;

    void sample(uint64_t cycle) {
        m_cycle = cycle;
        if (m_aw && m_pins.awready.get()) m_aw = false;
        if (m_w && m_pins.wready.get()) m_w = false;
        if (!m_aw && !m_w && m_launched) {
            m_monitor.event(cycle, EV_CSR_WRITE, m_nic, 0, m_waiting.back().address, m_waiting.back().data);
            m_launched = false;
        }
        if (m_ar && m_pins.arready.get()) m_ar = false;
        const bool b = m_pins.bvalid.get() != 0, r = m_pins.rvalid.get() != 0;
        if (m_held_b && !b) violation("bvalid fell before bready");
        if (m_held_r && (!r || m_pins.rdata.get() != m_held_data)) violation("r changed before rready");
        m_held_b = b && !m_ready;
        m_held_r = r && !m_ready;
        m_held_data = static_cast<uint32_t>(m_pins.rdata.get());
        if (b && m_ready) {
            if (m_waiting.empty() || !m_waiting.front().write || (m_waiting.size() == 1 && m_launched))
                return violation("bvalid without an outstanding write");
            finish(0, static_cast<uint32_t>(m_pins.bresp.get()));
        }
        if (r && m_ready) {
            if (m_waiting.empty() || m_waiting.front().write || m_ar)
                return violation("rvalid without an outstanding read");
            m_monitor.event(cycle, EV_CSR_READ, m_nic, 0, m_waiting.front().address, m_pins.rdata.get());
            finish(static_cast<uint32_t>(m_pins.rdata.get()), static_cast<uint32_t>(m_pins.rresp.get()));
        }
    }

    void drive() {
        if (!m_queue.empty() && !m_aw && !m_w && !m_ar) {
            const Op& op = m_queue.front();
            const bool room = m_waiting.empty() || (op.write && m_waiting.back().write && m_waiting.size() < MAX_WRITES);
            if (room) {
                if (op.write) {
                    m_pins.awaddr.set(op.address);
                    m_pins.wdata.set(op.data);
                    m_pins.wstrb.set(0xF);
                    m_aw = m_w = m_launched = true;
                } else {
                    m_pins.araddr.set(op.address);
                    m_ar = true;
                }
                m_waiting.push_back(op);
                m_queue.pop_front();
            }
        }
        m_ready = true;
        drive_pins();
    }

    void reset() {
        m_queue.clear();
        m_waiting.clear();
        m_done.clear();
        m_aw = m_w = m_ar = m_launched = m_ready = m_held_b = m_held_r = false;
        drive_pins();
    }

private:
    struct Op { uint64_t ticket; uint32_t address, data; bool write, posted; };

    void drive_pins() {
        m_pins.awvalid.set(m_aw);
        m_pins.wvalid.set(m_w);
        m_pins.arvalid.set(m_ar);
        m_pins.bready.set(m_ready);
        m_pins.rready.set(m_ready);
    }
    void finish(uint32_t data, uint32_t response) {
        const Op op = m_waiting.front();
        m_waiting.pop_front();
        if (op.posted) {
            posted_errors += response != 0;
            return;
        }
        m_done[op.ticket] = {data, response};
        completed = true;
    }
    void violation(const std::string& text) {
        m_failure.raise(Failure::PROTOCOL, "nic " + std::string(1, static_cast<char>('a' + m_nic))
                                               + ", port s_axil, cycle " + std::to_string(m_cycle) + ": " + text);
    }

    AxilPins m_pins;
    uint32_t m_nic;
    Monitor& m_monitor;
    Failure& m_failure;
    uint64_t m_last_ticket = 0, m_cycle = 0;
    std::deque<Op> m_queue, m_waiting;
    std::unordered_map<uint64_t, CsrResult> m_done;
    bool m_aw = false, m_w = false, m_ar = false, m_launched = false, m_ready = false;
    bool m_held_b = false, m_held_r = false;
    uint32_t m_held_data = 0;
};
